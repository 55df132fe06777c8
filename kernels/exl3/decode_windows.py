"""A lane's packed words -> its 16-bit windows, as few instructions each as the rate allows. Gluon device functions; no kernel.

A tile's bits are a ring: a lane's first windows reach into the bits of the lane before it (below 2 bits, of the two before), so their words
are loaded too, from the same lines. `bit b` of a lane's tile below counts from the end of the lane's own bits, low to high and on into the
lane before; window j of 8 begins at bit `8 * rate - floor((j + 1) * rate)` and is 16 bits long. Only its lowest 16 bits may be set: it is
multiplied mod 2^32. PRMT takes two bytes and zeros in one instruction; a window inside a byte costs a shift and a mask.
"""
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _bytes(a, b, B3: gl.constexpr, B2: gl.constexpr, B1: gl.constexpr, B0: gl.constexpr):
    # bytes 0 to 3 are a's, 4 to 7 are b's; the result's are named highest first
    return gl.inline_asm_elementwise(
        f"prmt.b32 $0, $1, $2, 0x{B3}{B2}{B1}{B0};", "=r,r,r", [a, b], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def _right(low, high, SHIFT: gl.constexpr):
    # bits SHIFT to SHIFT + 31 of high:low
    return gl.inline_asm_elementwise(
        f"shf.r.wrap.b32 $0, $1, $2, {SHIFT};", "=r,r,r", [low, high], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def _shr(a, SHIFT: gl.constexpr):
    # in assembly: the compiler makes a bit field extraction of a shift and a mask, and then cannot share the shift
    return gl.inline_asm_elementwise(f"shr.b32 $0, $1, {SHIFT};", "=r,r", [a], dtype=gl.uint32, is_pure=True, pack=1)


@gluon.jit
def _two(a, BYTE: gl.constexpr):
    # bytes BYTE and BYTE + 1 and two zeros
    return gl.inline_asm_elementwise(
        f"prmt.b32 $0, $1, 0, 0x44{BYTE + 1}{BYTE};", "=r,r", [a], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def _window(a, BIT: gl.constexpr, SPARE: gl.constexpr):
    # The window that begins at a bit of a register. Windows a multiple of 8 bits apart share the shift. Up, it may become a multiplication.
    SHIFT: gl.constexpr = BIT % 8
    if SHIFT == 0:
        return _two(a, BIT // 8)
    elif SPARE:  # noqa: RET505 (compile-time branches)
        return _two(a << (8 - SHIFT), BIT // 8 + 1)
    else:
        return _two(_shr(a, SHIFT), BIT // 8)


@gluon.jit
def _low_half(a, H: gl.constexpr):
    # the 16 bits from byte H on; above them anything
    if H == 0:
        return a
    else:  # noqa: RET505
        return _shr(a, 16)


@gluon.jit
def windows(packed, RATE2: gl.constexpr, T: gl.constexpr, SPARE: gl.constexpr):
    """The windows of k-tile T of 4: eight uint32 [32 TILES] in the order of the stream, upper halves zero. packed: of `load_words`.

    SPARE: whether the pipe that multiplies has room to shift.
    """
    P: gl.constexpr = T // 2  # word of the tile's field of 16 bits,
    H: gl.constexpr = T % 2 * 2  # and its first byte
    if RATE2 == 2:
        own, before, before2 = packed[0], packed[1], packed[2]
        low = _bytes(own, before, 5 + 2 * P, 1 + 2 * P, 4 + 2 * P, 2 * P)  # 16 bits of both tiles
        v = _bytes(low, before2, 4 + T, 4 + T, H + 1, H)  # 24 bits
        return (
            _window(v, 7, SPARE),
            _window(v, 6, SPARE),
            _window(v, 5, SPARE),
            _window(v, 4, SPARE),
            _window(v, 3, SPARE),
            _window(v, 2, SPARE),
            _window(v, 1, SPARE),
            _window(v, 0, SPARE),
        )
    elif RATE2 == 3:  # noqa: RET505 (compile-time branches)
        own, own_top, before, before_top, before2 = packed[0], packed[1], packed[2], packed[3], packed[4]
        # Bytes of all four tiles, bits 8 to 15 and 16 to 23: half bytes of the tops beside those of the lane before.
        second = _bytes(own_top, _shr(own_top, 4), 5, 1, 4, 0) & 0x0F0F0F0F | (before << 4) & 0xF0F0F0F0
        third = _shr(before, 4) & 0x0F0F0F0F | _bytes(before_top, before_top << 4, 1, 5, 0, 4) & 0xF0F0F0F0
        low = _bytes(own, second, 5 + 2 * P, 1 + 2 * P, 4 + 2 * P, 2 * P)  # 16 bits of both tiles
        high = _bytes(third, before2, 5 + 2 * P, 1 + 2 * P, 4 + 2 * P, 2 * P)
        v = _bytes(low, high, H + 5, H + 4, H + 1, H)  # 27 bits
        return (
            _window(v, 11, SPARE),
            _window(v, 9, SPARE),
            _window(v, 8, SPARE),
            _window(v, 6, SPARE),
            _window(v, 5, SPARE),
            _window(v, 3, SPARE),
            _window(v, 2, SPARE),
            _window(v, 0, SPARE),
        )
    elif RATE2 == 4:
        v = _bytes(packed[P], packed[2 + P], H + 5, H + 4, H + 1, H)
        return (
            _window(v, 14, SPARE),
            _window(v, 12, SPARE),
            _window(v, 10, SPARE),
            _window(v, 8, SPARE),
            _window(v, 6, SPARE),
            _window(v, 4, SPARE),
            _window(v, 2, SPARE),
            _window(v, 0, SPARE),
        )
    elif RATE2 == 5:
        high = _right(packed[2] << (28 - 4 * T), _low_half(packed[3 + P], H), 28)  # bits 16 to 35
        v = _bytes(packed[P], high, 5, 4, H + 1, H)
        return (
            _window(high, 2, SPARE),
            _window(v, 15, SPARE),
            _window(v, 13, SPARE),
            _window(v, 10, SPARE),
            _window(v, 8, SPARE),
            _window(v, 5, SPARE),
            _window(v, 3, SPARE),
            _window(v, 0, SPARE),
        )
    elif RATE2 == 6:
        own = _bytes(packed[P], packed[2], 7, 4 + T, H + 1, H)  # 24 bits
        before = packed[3 + P] & 0x1FFF1FFF  # of both tiles: no bit above the first window
        high = _bytes(own, before, H + 5, H + 4, 2, 1)  # bits 8 to 36
        return (
            _shr(high, 13),
            _window(high, 10, SPARE),
            _window(high, 7, SPARE),
            _window(high, 4, SPARE),
            _window(high, 1, SPARE),
            _window(own, 6, SPARE),
            _window(own, 3, SPARE),
            _two(packed[P], H),
        )
    elif RATE2 == 7:
        word = packed[P]  # 28 bits of the even tile; above them bits 16 to 19 of the odd one
        if T % 2 == 0:
            high = _right(word << 4, packed[4 + P], 18)  # bits 14 to 45
            w0, w1, w2, w3 = _window(high, 11, SPARE), _window(high, 7, SPARE), _window(high, 4, SPARE), _two(high, 0)
            w4, w5, w6, w7 = _window(word, 11, SPARE), _window(word, 7, SPARE), _window(word, 4, SPARE), _two(word, 0)
        else:
            low, before = packed[2], packed[6]  # 16 bits of both odd tiles
            top = _bytes(packed[3], before, 7, 2 * P + 5, 2 * P + 4, P)  # bits 20 to 43
            high = _right(word, top, 28)  # bits 16 to 47
            own = _bytes(low, high, 5, 4, 2 * P + 1, 2 * P)  # bits 0 to 31
            w0, w1, w2 = _window(high, 9, SPARE), _window(high, 5, SPARE), _window(high, 2, SPARE)
            w3, w4, w5 = _window(own, 14, SPARE), _window(own, 11, SPARE), _window(own, 7, SPARE)
            w6, w7 = _window(own, 4, SPARE), _two(low, 2 * P)
        return w0, w1, w2, w3, w4, w5, w6, w7
    elif RATE2 == 8:
        own = packed[T]
        if SPARE:
            high = _bytes(own, packed[4 + T], 5, 4, 3, 2)  # bits 16 to 47
            w0, w1, w2, w3 = _window(high, 12, SPARE), _two(high, 1), _window(high, 4, SPARE), _two(high, 0)
            w4, w5, w6, w7 = _window(own, 12, SPARE), _two(own, 1), _window(own, 4, SPARE), _two(own, 0)
        else:
            before = packed[4 + T] & 0xFFFF  # its upper bytes serve as zeros
            half = _right(own, before, 4)
            half_top = _shr(before, 4)
            w0, w2 = _bytes(half, half_top, 7, 6, 4, 3), _bytes(half, half_top, 7, 6, 3, 2)
            w4, w6 = _bytes(half, half_top, 7, 6, 2, 1), _bytes(half, half_top, 7, 6, 1, 0)
            w1, w3 = _bytes(own, before, 7, 6, 4, 3), _bytes(own, before, 7, 6, 3, 2)
            w5, w7 = _bytes(own, before, 7, 6, 2, 1), _bytes(own, before, 7, 6, 1, 0)
        return w0, w1, w2, w3, w4, w5, w6, w7
    elif RATE2 == 10:
        own = packed[T]
        high = _bytes(packed[4], packed[5 + T], 6, 5, 4, T)  # bits 32 to 63
        return (
            _window(high, 3, SPARE),
            _two(_right(own, high, 30), 0),
            _two(_right(own, high, 25), 0),
            _two(_right(own, high, 20), 0),
            _window(own, 15, SPARE),
            _window(own, 10, SPARE),
            _window(own, 5, SPARE),
            _two(own, 0),
        )
    elif RATE2 == 12:
        middle = packed[2 + T]  # bits 16 to 47
        own = _bytes(packed[P], middle, 5, 4, H + 1, H)  # bits 0 to 31
        before = packed[6 + P] & 0x03FF03FF  # of both tiles: no bit above the first window
        high = _bytes(middle, before, H + 5, H + 4, 3, 2)  # bits 32 to 57
        return (
            _shr(high, 10),
            _window(high, 4, SPARE),
            _window(middle, 14, SPARE),
            _two(middle, 1),
            _window(middle, 2, SPARE),
            _window(own, 12, SPARE),
            _window(own, 6, SPARE),
            _two(packed[P], H),
        )
    elif RATE2 == 14:
        own = packed[T]
        top = _bytes(packed[6], packed[7 + T], 6, 5, 4, T)  # bits 48 to 79
        high = _bytes(packed[4 + P], top, 5, 4, H + 1, H)  # bits 32 to 63
        return (
            _window(top, 1, SPARE),
            _window(high, 10, SPARE),
            _window(high, 3, SPARE),
            _two(_right(own, high, 28), 0),
            _two(_right(own, high, 21), 0),
            _window(own, 14, SPARE),
            _window(own, 7, SPARE),
            _two(own, 0),
        )
    else:
        gl.static_assert(RATE2 == 16)
        own, high = packed[T], packed[4 + T]
        before = packed[8 + T] & 0xFF
        middle = _shr(own, 24)
        return (
            _bytes(high, before, 6, 5, 4, 3),
            _two(high, 2),
            _two(high, 1),
            _two(high, 0),
            _bytes(middle, high, 2, 1, 4, 0),
            _two(own, 2),
            _two(own, 1),
            _two(own, 0),
        )
