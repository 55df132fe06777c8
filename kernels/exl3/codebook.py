"""The three codebooks: what each of the 65536 16-bit states is worth, and the marker that names the codebook in a file.

Formulas: exl3-format 2.3. Integer arithmetic is mod 2^32; each value is rounded once to fp16. Knows no tiles and no rates.
"""

import enum
import functools

import torch
from torch import Tensor

NUM_STATES = 1 << 16


class Codebook(enum.StrEnum):
    """Names as `quantization_config.codebook` spells them."""

    THREE_INST = "3inst"
    MCG = "mcg"
    MUL1 = "mul1"

    @property
    def marker(self) -> int | None:
        """Value, as int32, of the scalar tensor `.mcg` or `.mul1` beside a trellis; None for 3inst, which has no such tensor."""
        multiplier = _MULTIPLIERS.get(self)
        return None if multiplier is None else _as_int32(multiplier)

    @property
    def number(self) -> int:
        """What kernels know it by, as a compile-time constant: 0, 1 and 2 in the order above."""
        return tuple(Codebook).index(self)

    @property
    def allows_half_rates(self) -> bool:
        """1.5, 2.5 and 3.5 bits exist for mul1 only."""
        return self is Codebook.MUL1


_MULTIPLIERS = {Codebook.MCG: 0xCBAC1FED, Codebook.MUL1: 0x83DCD12D}


def _as_int32(unsigned: int) -> int:
    return unsigned - (1 << 32) if unsigned >= 1 << 31 else unsigned


@functools.cache
def values(codebook: Codebook) -> Tensor:
    """fp16 [65536]: the value of every state. Shared: do not write into it."""
    states = torch.arange(NUM_STATES, dtype=torch.int64)
    if codebook is Codebook.MUL1:
        word = (states * _MULTIPLIERS[codebook]) & 0xFFFFFFFF
        byte_sum = (word & 255) + (word >> 8 & 255) + (word >> 16 & 255) + (word >> 24)
        # fma(0x6400 + byte_sum, 0x1EEE, 0xC931) read as fp16; exact in fp64, so that the cast is the only rounding.
        return ((1024 + byte_sum).double() * (1774 * 2.0**-18) - 10.3828125).half()
    multiplier, addend = (_MULTIPLIERS[codebook], 0) if codebook is Codebook.MCG else (89226354, 64248484)
    word = (states * multiplier + addend) & 0xFFFFFFFF
    # Two fp16 numbers of magnitude [2^-3, 2), side by side: their sum is exact in fp64.
    word = (word & 0x8FFF8FFF) ^ 0x3B603B60
    return (_fp16_from_bits(word & 0xFFFF).double() + _fp16_from_bits(word >> 16).double()).half()


def _fp16_from_bits(bits: Tensor) -> Tensor:
    return bits.to(torch.uint16).view(torch.float16)
