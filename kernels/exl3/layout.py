"""Where the bits of a trellis are: rates, tile geometry, and states packed into words and back. No codebook values, no rotations.

A tile is 16 x 16 weights in *stream order* t = 0..255; each weight owns d(t) bits of a closed ring, and its *state* is the 16 ring
bits that end with its own (exl3-format 2.1). Everything here runs over many tiles at once, one position of all tiles after the other.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels.exl3.codebook import Codebook

TILE = 16  # a tile's width in both directions
TILE_WEIGHTS = TILE * TILE
STATE_BITS = 16
BLOCK = 128  # both dims of a linear are multiples of it: the rotation's width

RATES = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0)


@dataclass(frozen=True, slots=True)
class Exl3Tensors:
    """One quantized linear as the checkpoint stores it (exl3-format 1.2), checked when made.

    trellis: int16 [in/16, out/16, 16 * rate]. suh: fp16 [in]. svh: fp16 [out]; zeros mark padded output columns.
    codebook: what the states mean. The bias is no part of the quantized product.
    Raises ValueError when dtypes, shapes, rate and codebook do not fit together.
    """

    trellis: Tensor
    suh: Tensor
    svh: Tensor
    codebook: Codebook

    def __post_init__(self) -> None:
        check_trellis(tuple(self.trellis.shape), self.trellis.dtype, self.codebook)
        for name, tensor, size in (("suh", self.suh, self.in_features), ("svh", self.svh, self.out_features)):
            if tensor.dtype != torch.float16 or tuple(tensor.shape) != (size,):
                raise ValueError(f"{name} must be float16 [{size}], is {tensor.dtype} {list(tensor.shape)}")

    @property
    def in_features(self) -> int:
        """Padded input width, a multiple of 128."""
        return int(self.trellis.shape[0]) * TILE

    @property
    def out_features(self) -> int:
        """Padded output width, a multiple of 128."""
        return int(self.trellis.shape[1]) * TILE

    @property
    def rate(self) -> float:
        """Bits a weight."""
        return rate_of_words(int(self.trellis.shape[2]))


def check_trellis(shape: tuple[int, ...], dtype: torch.dtype, codebook: Codebook) -> None:
    """Raise ValueError unless a tensor of this shape and dtype can be the trellis of a linear with that codebook."""
    if dtype != torch.int16 or len(shape) != 3:
        raise ValueError(f"trellis must be int16 with 3 dimensions, is {dtype} {list(shape)}")
    rows, columns, words = shape
    if rows < 1 or columns < 1 or rows * TILE % BLOCK or columns * TILE % BLOCK:
        raise ValueError(f"trellis {list(shape)}: both widths (16 x the first two) must be multiples of {BLOCK}")
    rate = rate_of_words(words)
    if rate != int(rate) and not codebook.allows_half_rates:
        raise ValueError(f"trellis {list(shape)}: {rate} bits exist with codebook mul1 only, not with {codebook}")


def rate_of_words(num_words: int) -> float:
    """Bits a weight of a tile of `num_words` 16-bit words; ValueError when no rate has so many."""
    rate = num_words / TILE
    if rate not in RATES:
        raise ValueError(f"trellis: {num_words} words a tile match no rate in {', '.join(f'{r:g}' for r in RATES)}")
    return rate


def words_of_rate(rate: float) -> int:
    """16-bit words of one tile; ValueError for a rate that does not exist."""
    if rate not in RATES:
        raise ValueError(f"rate {rate:g} is not one of {', '.join(f'{r:g}' for r in RATES)}")
    return int(TILE * rate)


@functools.cache
def step_bits(rate: float) -> tuple[int, ...]:
    """d(t) [256]: new bits at each stream position. At half rates odd positions carry the extra bit."""
    words_of_rate(rate)
    base = int(rate)
    return tuple(base + (t % 2 if rate != base else 0) for t in range(TILE_WEIGHTS))


@dataclass(frozen=True, slots=True)
class _Windows:
    """Stream positions whose windows end at the same bit of a 32-bit word, `shift` bits above its lowest."""

    shift: int
    positions: Tensor  # int64 [n]
    words: Tensor  # int64 [n]: the word that holds the window's last bit
    previous: Tensor  # int64 [n]: the word before it on the ring


@functools.cache
def _windows(rate: float) -> tuple[_Windows, ...]:
    ends = torch.tensor(step_bits(rate)).cumsum(0)  # S(t)
    num_words = words_of_rate(rate) // 2
    last_bits = ends - 1
    words, shifts = last_bits // 32, 31 - last_bits % 32
    return tuple(
        _Windows(shift, at, words[at], (words[at] - 1) % num_words)
        for shift in range(32)
        if len(at := torch.nonzero(shifts == shift).flatten())
    )


def unpack_states_by_position(trellis: Tensor) -> Tensor:
    """int16 [..., words] -> states, int32 [256, tiles]: position-major, as the vectorized decoders want them."""
    rate = rate_of_words(int(trellis.shape[-1]))
    # Two 16-bit words are one little-endian 32-bit word, whose bits the ring takes most significant first.
    pairs = trellis.contiguous().view(-1, trellis.shape[-1]).view(torch.int32).T.contiguous()
    states = torch.empty((TILE_WEIGHTS, pairs.shape[1]), dtype=torch.int32)
    for window in _windows(rate):
        part = pairs[window.words]
        part >>= window.shift  # copies of the sign come in from above; the mask below drops them
        if window.shift > 32 - STATE_BITS:
            part &= (1 << (32 - window.shift)) - 1
            part |= pairs[window.previous] << (32 - window.shift)
        part &= 0xFFFF
        states[window.positions] = part
    return states


def unpack_states(trellis: Tensor) -> Tensor:
    """int16 [..., words] -> states 0..65535 in stream order, int32 [..., 256]."""
    return unpack_states_by_position(trellis).T.reshape(*trellis.shape[:-1], TILE_WEIGHTS).contiguous()


def pack_states(states: Tensor, rate: float) -> Tensor:
    """Integer states [..., 256] in stream order -> int16 [..., words]. Only the low d(t) bits of each state are used."""
    num_words = words_of_rate(rate)
    by_position = states.reshape(-1, TILE_WEIGHTS).T.to(torch.int64)
    pairs = torch.zeros((num_words // 2, by_position.shape[1]), dtype=torch.int64)
    end = 0
    for t, bits in enumerate(step_bits(rate)):
        end += bits
        symbol = by_position[t] & ((1 << bits) - 1)
        word, shift = (end - 1) // 32, 31 - (end - 1) % 32
        pairs[word] |= (symbol << shift) & 0xFFFFFFFF
        if shift + bits > 32:
            pairs[word - 1] |= symbol >> (32 - shift)
    packed = pairs.T.to(torch.uint32).contiguous().view(torch.int16)
    return packed.reshape(*states.shape[:-1], num_words)


@functools.cache
def tile_rows_columns() -> tuple[Tensor, Tensor]:
    """int64 [256] twice: row (input) and column (output) inside the tile of each stream position (exl3-format 2.2)."""
    t = torch.arange(TILE_WEIGHTS)
    lane, j = t >> 3, t & 7
    return (lane & 3) * 2 + (j & 1) + 8 * (j >> 1 & 1), (lane >> 2) + 8 * (j >> 2)


def matrix_to_tiles(matrix: Tensor) -> Tensor:
    """[in, out] -> [in/16, out/16, 256] in stream order."""
    rows, columns = tile_rows_columns()
    tiles = matrix.view(matrix.shape[0] // TILE, TILE, matrix.shape[1] // TILE, TILE).transpose(1, 2)
    return tiles[:, :, rows, columns]


def positions_to_matrix(by_position: Tensor, num_rows: int) -> Tensor:
    """[256, tiles], tiles row-major over a grid of `num_rows` tile rows -> [16 * num_rows, out]."""
    # t = column bits 0-2, row bits 1-2, column bit 3, row bit 3, row bit 0.
    grid = by_position.view(8, 4, 2, 2, 2, num_rows, -1)
    return grid.permute(5, 3, 1, 4, 6, 2, 0).reshape(num_rows * TILE, -1)


def unpack_signs(packed: Tensor) -> Tensor:
    """Legacy `.su` / `.sv`, int16 [n/16] -> fp16 [n]: bit i (lowest first) of word w set means that feature 16 w + i is -1."""
    bits = packed.to(torch.int32)[:, None] >> torch.arange(16, dtype=torch.int32) & 1
    return (1 - 2 * bits).flatten().half()
