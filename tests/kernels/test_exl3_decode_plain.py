"""The plain decode, interpreted: every rate and codebook, bit for bit, and a tile of columns that does not begin at the first."""

import pytest
import torch

from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import RATES, Exl3Tensors
from espalier.kernels.exl3.pack import pack_trellis
from espalier.kernels.exl3.reference import decode_inner
from tests.kernels.test_exl3_pack import random_trellis
from tests.support.interpret import interpreted


def decode_both(rate: float, codebook: Codebook, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    from espalier.kernels.exl3.reconstruct import reconstruct

    trellis = random_trellis(rate, rows, columns)
    tensors = Exl3Tensors(trellis, torch.ones(16 * rows).half(), torch.ones(16 * columns).half(), codebook)
    out = torch.full((16 * rows, 16 * columns), torch.nan, dtype=torch.float16)
    assert reconstruct(pack_trellis(trellis), codebook, out) is out
    return out.view(torch.int16), decode_inner(tensors).view(torch.int16)


@pytest.mark.parametrize("rate", RATES)
@interpreted
def test_every_rate_and_codebook(rate: float) -> None:
    for codebook in Codebook if rate == int(rate) else [Codebook.MUL1]:
        got, want = decode_both(rate, codebook, 8, 8)
        assert torch.equal(got, want), codebook


@interpreted
def test_several_steps_and_columns() -> None:
    got, want = decode_both(3.5, Codebook.MUL1, 16, 24)
    assert torch.equal(got, want)
