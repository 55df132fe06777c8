"""RMS norm against fp64, and its bits against the row alone."""

import pytest
import torch

from espalier.kernels.norm.reference import rms_norm


@pytest.mark.parametrize("width", [1, 63, 64, 576, 640, 4096])
def test_matches_the_definition(width: int) -> None:
    x, weight = torch.randn(5, width) * 3, torch.rand(width) + 0.5
    wide = x.double()
    exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(64, 640), (24, 9, 64)])
def test_a_rows_bits_are_its_own(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.rand(shape[-1])
    whole = rms_norm(x, weight, 1e-6)
    for row in (0, 5, shape[0] - 1):
        assert torch.equal(rms_norm(x[row : row + 1], weight, 1e-6)[0], whole[row])
    assert torch.equal(rms_norm(x[3:17], weight, 1e-6), whole[3:17])
