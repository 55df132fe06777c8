import zlib

import pytest
import torch

from espalier.kernels.exl3.codebook import NUM_STATES, Codebook, values

# exl3-format 2.3: crc32 of all values, values of states 0..3, of 0x1234 and 0xFFFF.
CHECKS = {
    Codebook.THREE_INST: (0x4C83D524, [0x3A25, 0xBB5B, 0x3B74, 0x34B6, 0xC066, 0xB110]),
    Codebook.MCG: (0xD2D13C52, [0x3F60, 0x304E, 0xBA13, 0x3AB8, 0x3E0F, 0x3ACD]),
    Codebook.MUL1: (0x2BDF05C5, [0xC2E8, 0x3921, 0xB72D, 0x3239, 0xB89E, 0xB936]),
}


@pytest.mark.parametrize("codebook", Codebook)
def test_every_value_is_bit_exact(codebook: Codebook) -> None:
    crc, samples = CHECKS[codebook]
    bits = values(codebook).view(torch.uint16)
    assert bits.shape == (NUM_STATES,)
    assert zlib.crc32(bits.numpy().tobytes()) == crc
    assert [int(bits[s]) for s in (0, 1, 2, 3, 0x1234, 0xFFFF)] == samples


def test_markers_are_the_multipliers_as_int32() -> None:
    assert Codebook.THREE_INST.marker is None
    assert Codebook.MCG.marker == 0xCBAC1FED - 2**32
    assert Codebook.MUL1.marker == 0x83DCD12D - 2**32
