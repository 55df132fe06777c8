"""The trellis as the fast kernels want it: rearranged once, at load, so that a warp's loads are wide and side by side. Loses and adds no bit.

Lane l of a warp decodes stream positions 8l..8l+7 of a tile, so it owns `8 * rate` ring bits. One *block* holds four tiles that follow each
other along the inputs (64 x 16 weights, one step of a kernel's loop) in `128 * rate` bytes. A lane's own bits of a tile are cut, the last
ones of the stream first, into fields of 8, 4, 2 and 1 half bytes. All fields of one size make a *plane*: [lane, tile] in that order, lane
by lane, little-endian. Planes follow each other:

    rate                                          1    1.5   2    2.5    3     3.5     4    5     6      7        8
    bits of a lane's field of a tile, by plane    8    8 4   16   16 4   16 8  (16 8 4) 32  32 8  16 32  32 16 8  32 32

At 3.5 bits the planes have these sizes, but hold 28 bits of each even tile and 4 of the odd one, 16 bits of the odd ones, 8 bits of the odd
ones, which costs fewer instructions. The next lane finds the bits before its own in the first plane (at 1, 1.5 and 3.5 bits it needs more).
Blocks are ordered [in/64, out/16]; so columns can be concatenated, and a step's blocks of neighbouring column tiles lie side by side.
"""

import functools

import torch
from torch import Tensor

from espalier.kernels.exl3.layout import rate_of_words

STEP_TILES = 4  # tiles along the inputs in one block
_LANES = 32
_CHUNK_BYTES = 1 << 26  # rearranged at a time, which bounds the temporary memory

# A lane's part of a plane: (tile, first half byte of the lane's own, the last of the stream being 0, number of half bytes) of each field.
Plane = tuple[tuple[int, int, int], ...]


def _planes(*sizes: int) -> tuple[Plane, ...]:
    return tuple(tuple((tile, sum(sizes[:i]), size) for tile in range(STEP_TILES)) for i, size in enumerate(sizes))


PLANES: dict[float, tuple[Plane, ...]] = {
    1.0: _planes(2),
    1.5: _planes(2, 1),
    2.0: _planes(4),
    2.5: _planes(4, 1),
    3.0: _planes(4, 2),
    3.5: (((0, 0, 7), (1, 4, 1), (2, 0, 7), (3, 4, 1)), ((1, 0, 4), (3, 0, 4)), ((1, 5, 2), (3, 5, 2))),
    4.0: _planes(8),
    5.0: _planes(8, 2),
    6.0: _planes(4, 8),
    7.0: _planes(8, 4, 2),
    8.0: _planes(8, 8),
}


@functools.cache
def _sources(rate: float) -> tuple[int, Tensor]:
    """(bits of a unit, for each unit of a packed block the unit of the four tiles' bytes that it comes from: int64).

    Units are bytes where the rate allows it, else half bytes; unit u of a byte string is its bits [u * bits, (u + 1) * bits), lowest first.
    """
    bits = 8 if rate == int(rate) else 4
    own = int(8 * rate) // bits  # units of a lane's bits of one tile
    word = 32 // bits
    sources = []
    for plane in PLANES[rate]:
        for lane in range(_LANES):
            for tile, first, size in plane:
                for unit in range(first * 4 // bits, (first + size) * 4 // bits):
                    stream = (lane + 1) * own - 1 - unit  # which runs down from each word's highest bit
                    sources.append(tile * own * _LANES + stream // word * word + word - 1 - stream % word)
    return bits, torch.tensor(sources)


def pack_trellis(trellis: Tensor) -> Tensor:
    """int16 [in/16, out/16, 16 * rate] -> int32 [in/64, out/16, 32 * rate] contiguous, on the trellis's device. in: a multiple of 64.

    Raises ValueError for a shape that is no trellis.
    """
    if trellis.dtype != torch.int16 or trellis.dim() != 3 or trellis.shape[0] % STEP_TILES:
        raise ValueError(f"trellis must be int16 [4 n, out/16, words], is {trellis.dtype} {list(trellis.shape)}")
    rows, columns, words = trellis.shape
    bits, sources = _sources(rate_of_words(words))
    index = sources.to(trellis.device)
    packed = torch.empty(
        (rows // STEP_TILES, columns, STEP_TILES * words // 2), dtype=torch.int32, device=trellis.device
    )
    for steps in _chunks(packed):
        tiles = trellis[steps.start * STEP_TILES : steps.stop * STEP_TILES].contiguous().view(torch.uint8)
        blocks = (
            tiles.view(-1, STEP_TILES, columns, 2 * words).transpose(1, 2).reshape(-1, columns, STEP_TILES * 2 * words)
        )
        packed[steps] = _merge(_split(blocks, bits).index_select(-1, index), bits).view(torch.int32)
    return packed


def unpack_words(packed: Tensor) -> Tensor:
    """The inverse: int32 [in/64, out/16, 32 * rate] -> int16 [in/16, out/16, 16 * rate]."""
    steps, columns, size = packed.shape
    words = size * 2 // STEP_TILES
    bits, sources = _sources(rate_of_words(words))
    units = _split(packed.contiguous().view(torch.uint8), bits)
    blocks = _merge(units.index_select(-1, sources.argsort().to(packed.device)), bits)
    tiles = blocks.view(steps, columns, STEP_TILES, 2 * words).transpose(1, 2).contiguous()
    return tiles.view(torch.int16).view(steps * STEP_TILES, columns, words)


def _chunks(packed: Tensor) -> list[slice]:
    count = max(1, _CHUNK_BYTES // (packed[0].numel() * 4))
    return [slice(start, min(start + count, len(packed))) for start in range(0, len(packed), count)]


def _split(data: Tensor, bits: int) -> Tensor:
    """uint8 [.., n] -> its units, one a byte."""
    return data if bits == 8 else torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)


def _merge(units: Tensor, bits: int) -> Tensor:
    return units.contiguous() if bits == 8 else units[..., ::2] | units[..., 1::2] << 4
