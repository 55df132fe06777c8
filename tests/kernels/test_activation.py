"""SwiGLU's gate against fp64, at any place, and at the ends of the range."""

import torch

from espalier.kernels.activation.reference import silu_mul


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
