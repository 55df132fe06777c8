"""SwiGLU's gate against fp64, at any place, and at the ends of the range."""

import pytest
import torch
from torch import Tensor

from espalier.kernels import elementary
from espalier.kernels.activation.reference import silu_mul
from tests.support.bits import same_bits


def test_matches_the_definition() -> None:
    gate, up = torch.randn(7, 333) * 6, torch.randn(7, 333)
    exact = torch.nn.functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(silu_mul(gate, up).double(), exact, rtol=2e-6, atol=1e-7)


def test_bits_do_not_depend_on_place() -> None:
    both = torch.randn(40, 2 * 259)
    gate, up = both[:, :259], both[:, 259:]
    whole = silu_mul(gate, up)
    for start, stop in ((0, 1), (3, 4), (7, 40)):
        assert torch.equal(silu_mul(gate[start:stop], up[start:stop]), whole[start:stop])
    assert torch.equal(silu_mul(gate[:, 5:6], up[:, 5:6]), whole[:, 5:6])


def test_extremes_are_finite() -> None:
    gate = torch.tensor([-1e4, -89.0, 0.0, 89.0, 1e4])
    assert silu_mul(gate, torch.ones(5)).tolist() == [0.0, silu_mul(gate[1:2], torch.ones(1)).item(), 0.0, 89.0, 1e4]


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """fp32 a * b + c, rounded once: the sum in fp64 is rounded to odd, then to fp32."""
    product, addend = a.double() * b.double(), c.double()  # exact
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    even = total.view(torch.int64) % 2 == 0
    toward = torch.nextafter(total, torch.full_like(total, torch.inf).copysign(lost))
    return torch.where((lost != 0) & even, toward, total).float()


@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_the_short_division_is_ieee_for_every_half(ulps: int) -> None:
    """What `short_gated` does with a reciprocal that is off by so many ulps."""
    gate = torch.arange(-32768, 32768).short().view(torch.float16).float()
    gate = gate[gate.isfinite() & (gate >= -elementary.EXP_OVERFLOW)]
    eighth = (1.0 + elementary.exp_f32(-gate)) / 8
    exact = (eighth == (2.0 - 2.0**-23) / 8).int()  # where the GPUs' own division needs the nearest fp32
    inverse = ((1.0 / eighth).view(torch.int32) + ulps * (1 - exact)).view(torch.float32)
    quotient = gate * inverse
    quotient = fma(-fma(eighth, quotient, -gate), inverse, quotient)
    assert int(exact.sum()) == 1
    assert same_bits(quotient, gate / eighth)
