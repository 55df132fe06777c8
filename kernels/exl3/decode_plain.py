"""Packed words -> weights in plain Triton: any GPU, any Triton that we install, and the interpreter. A device function; no kernel.

    weights = decode_step(words, tile, step, tiles, NUM_TILES, RATE2, CODEBOOK)      fp16 [64, 16 * NUM_TILES]: [input, output]

words: pointer to int32, the packed trellis (`exl3/pack.py`), of less than 2^31 elements. step: which 64 inputs. tile: the first of NUM_TILES
column tiles, a power of two. tiles: column tiles of the whole trellis. RATE2: twice the rate (7 is 3.5 bits). CODEBOOK:
`Codebook.number`. Each lane's fields are loaded once and give its eight windows; then weights move to where a product wants them.
"""
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl


@triton.jit
def _field(block, START: tl.constexpr, NIBBLES: tl.constexpr, at):
    # uint32: field number `at` of the plane that begins at byte START of a block
    if NIBBLES == 8:
        return tl.load(block.to(tl.pointer_type(tl.uint32), bitcast=True) + (START // 4 + at))
    elif NIBBLES == 4:  # noqa: RET505 (compile-time branches)
        return tl.load(block.to(tl.pointer_type(tl.uint16), bitcast=True) + (START // 2 + at)).to(tl.uint32)
    elif NIBBLES == 2:
        return tl.load(block.to(tl.pointer_type(tl.uint8), bitcast=True) + (START + at)).to(tl.uint32)
    else:
        byte = tl.load(block.to(tl.pointer_type(tl.uint8), bitcast=True) + (START + at // 2)).to(tl.uint32)
        return (byte >> (at % 2 * 4).to(tl.uint32)) & 15


@triton.jit
def _plane_bits(block, SIZE: tl.constexpr, RATE2: tl.constexpr, lane, t):
    # The wider planes that exist lie before this one: 64 bytes, and 4 bits of a tile, for each of their half bytes.
    LOW: tl.constexpr = RATE2 & (16 - 2 * SIZE)
    return _field(block, 64 * LOW, SIZE, lane * 4 + t).to(tl.uint64) << (4 * LOW)


@triton.jit
def _own_bits(block, RATE2: tl.constexpr, lane, t):
    # uint64: a lane's 4 * RATE2 bits of a k-tile
    if RATE2 == 16:
        high = _field(block, 512, 8, lane * 4 + t).to(tl.uint64)
        return _field(block, 0, 8, lane * 4 + t).to(tl.uint64) | high << 32
    elif RATE2 == 7:  # noqa: RET505
        word = _field(block, 0, 8, lane * 2 + t // 2).to(tl.uint64)
        odd = _field(block, 256, 4, lane * 2 + t // 2).to(tl.uint64) | (word >> 28) << 16
        odd |= _field(block, 384, 2, lane * 2 + t // 2).to(tl.uint64) << 20
        return tl.where(t % 2 == 0, word & 0xFFFFFFF, odd)
    elif RATE2 == 12:
        high = _field(block, 256, 8, lane * 4 + t).to(tl.uint64)
        return _field(block, 0, 4, lane * 4 + t).to(tl.uint64) | high << 16
    else:
        bits = tl.zeros_like(lane + t).to(tl.uint64)
        for i in tl.static_range(4):
            if RATE2 & (8 >> i):
                bits |= _plane_bits(block, 8 >> i, RATE2, lane, t)
        return bits


@triton.jit
def _bits_before(block, RATE2: tl.constexpr, lane, t):
    # uint32: at least the 15 bits before a lane's own, the last one lowest
    before = (lane + 31) % 32
    if RATE2 < 4:
        earlier = _field(block, 0, 2, (lane + 30) % 32 * 4 + t)
        return _own_bits(block, RATE2, before, t).to(tl.uint32) | earlier << (4 * RATE2)
    elif RATE2 == 7:  # noqa: RET505
        return _own_bits(block, RATE2, before, t).to(tl.uint32)
    else:
        return _field(block, 0, 8 if RATE2 >= 8 and RATE2 != 12 else 4, before * 4 + t)


@triton.jit
def _values(states, CODEBOOK: tl.constexpr):
    # uint32 -> fp16; formulas: exl3-format 2.3. Sums are exact in fp32, so the last cast is the only rounding.
    if CODEBOOK == 2:
        x = states * 0x83DCD12D
        x = (x & 0x00FF00FF) + ((x >> 8) & 0x00FF00FF)
        byte_sum = (x & 0xFFFF) + (x >> 16)
        return ((byte_sum + 1024).to(tl.float32) * 0.00676727294921875 - 10.3828125).to(tl.float16)
    elif CODEBOOK == 1:  # noqa: RET505
        x = states * 0xCBAC1FED
    else:
        x = states * 89226354 + 64248484
    x = (x & 0x8FFF8FFF) ^ 0x3B603B60
    low = x.to(tl.uint16).to(tl.float16, bitcast=True)
    high = (x >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return (low.to(tl.float32) + high.to(tl.float32)).to(tl.float16)


@triton.jit
def decode_step(words, tile, step, tiles, NUM_TILES: tl.constexpr, RATE2: tl.constexpr, CODEBOOK: tl.constexpr):
    """See the top of the file."""
    p = tl.arange(0, 32 * NUM_TILES)[:, None]
    t = tl.arange(0, 4)[None, :]
    block = words + ((step * tiles + tile) * (16 * RATE2) + p // 32 * (16 * RATE2))
    own = _own_bits(block, RATE2, p % 32, t)
    before = _bits_before(block, RATE2, p % 32, t)
    end = (tl.arange(0, 8)[None, None, :] + 1) * RATE2 // 2  # bits of the lane that windows include
    # A window that includes more than 16 bits of the lane has none of the bits before: they are shifted out of it.
    states = (own[:, :, None] >> (4 * RATE2 - end).to(tl.uint64)).to(tl.uint32) | (
        before[:, :, None] << tl.minimum(end, 16).to(tl.uint32)
    )
    values = _values(states & 0xFFFF, CODEBOOK)
    # [column tile, column bits 0-2, row bits 1-2, row bits 4-5, column bit 3, row bit 3, row bit 0] (exl3-format 2.2)
    values = values.reshape([NUM_TILES, 8, 4, 4, 2, 2, 2]).permute((3, 5, 2, 6, 0, 4, 1))
    return values.reshape([64, 16 * NUM_TILES])
