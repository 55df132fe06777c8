"""exp_f32, log_f32 and tree_sum: accuracy, limits, and bits that do not depend on place."""

import math

import pytest
import torch

from espalier.kernels.elementary import EXP_OVERFLOW, EXP_UNDERFLOW, exp_f32, log_f32, tree_sum

INF = math.inf


def ulp_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest error in units of the last place of the exact (float64) value."""
    spacing = torch.exp2(torch.floor(torch.log2(exact.abs())) - 23)
    return float(((got.double() - exact).abs() / spacing).max())


def test_exp_is_within_two_ulp() -> None:
    x = torch.cat([torch.linspace(EXP_UNDERFLOW, EXP_OVERFLOW, 1_000_001), torch.linspace(-1, 1, 500_001)])
    assert ulp_error(exp_f32(x), torch.exp(x.double())) <= 2.0


def test_exp_limits() -> None:
    x = torch.tensor([-INF, -1e30, -87.0, 0.0, -0.0, 88.5, INF])
    assert exp_f32(x).tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, INF, INF]
    assert exp_f32(torch.tensor([math.nan])).isnan().all()


def test_log_is_within_two_ulp() -> None:
    every_exponent = torch.arange(0x00800000, 0x7F800000, 1009, dtype=torch.int32).view(torch.float32)
    near_one = torch.arange(0x3F000000, 0x40000000, 13, dtype=torch.int32).view(torch.float32)
    x = torch.cat([every_exponent, near_one])
    x = x[x != 1.0]
    assert ulp_error(log_f32(x), torch.log(x.double())) <= 2.0


def test_log_limits() -> None:
    x = torch.tensor([0.0, 1e-42, 1.0, INF])
    assert log_f32(x).tolist() == [-INF, -INF, 0.0, INF]
    assert log_f32(torch.tensor([-1.0, math.nan, -INF])).isnan().all()


def test_inputs_are_left_alone() -> None:
    x = torch.linspace(0.1, 5.0, 40)
    before = x.clone()
    exp_f32(x), log_f32(x), tree_sum(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("function", [exp_f32, log_f32])
def test_bits_do_not_depend_on_place(function) -> None:  # type: ignore[no-untyped-def]
    x = torch.rand(1000, generator=torch.Generator().manual_seed(1)) * 20
    whole = function(x)
    for start, stop in ((0, 1), (1, 8), (3, 66), (17, 1000), (999, 1000)):
        assert torch.equal(function(x[start:stop]), whole[start:stop])
    assert torch.equal(function(x.reshape(10, 100).t()), whole.reshape(10, 100).t())


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 127, 576, 640])
def test_tree_sum_matches_its_definition(n: int) -> None:
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(n))

    def by_hand(values: list[torch.Tensor]) -> torch.Tensor:
        if len(values) == 1:
            return values[0]
        half = (len(values) + 1) // 2
        low, high = values[:half], values[half:]
        return by_hand([a + b for a, b in zip(low, high, strict=False)] + low[len(high) :])

    assert torch.equal(tree_sum(x), by_hand([x[:, i] for i in range(n)]))
    assert torch.equal(tree_sum(x)[1], tree_sum(x[1]))
    torch.testing.assert_close(tree_sum(x), x.sum(-1), rtol=1e-5, atol=1e-4)
