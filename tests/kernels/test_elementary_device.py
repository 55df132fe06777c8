"""exp_f32, log_f32 and tree_sum in Triton: the bits of `elementary.py`, interpreted and compiled."""

import math

import pytest
import torch
from torch import Tensor

from espalier.kernels import elementary
from tests.support.interpret import interpreted

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from espalier.kernels.elementary_device import (  # noqa: E402
    exp_f32,
    log_f32,
    one_plus_exp_eighth,
    tree_index,
    tree_sum,
)

LENGTHS = [1, 2, 3, 5, 7, 64, 127, 128, 576, 640, 1000, 2304, 4352, 5120]


@triton.jit
def _apply(x, y, n, LOG: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(y + i, log_f32(value) if LOG else exp_f32(value), mask=i < n)


@triton.jit
def _apply_sum(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, one_plus_exp_eighth(tl.load(x + i, mask=i < n, other=0.0)), mask=i < n)


@triton.jit
def _sum(x, y, n, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    index, valid = tree_index(0, tl.arange(0, 1 << LEVELS), n, LEVELS)
    tl.store(y, tree_sum(tl.load(x + index, mask=valid, other=0.0), LEVELS))


@triton.jit
def _sum_columns(x, y, n, num_columns, LEVELS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    column = tl.arange(0, COLUMNS)
    index, valid = tree_index(column[None, :], tl.arange(0, 1 << LEVELS)[:, None], n, LEVELS)
    total = tree_sum(tl.load(x + index, mask=valid, other=0.0), LEVELS)
    tl.store(y + column, total, mask=column < num_columns)


def numbers(count: int) -> Tensor:
    """Bit patterns of every kind: all exponents, both signs, subnormals, infinities, NaN; and the borders of both functions."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (count,), generator=generator, dtype=torch.int64).to(torch.int32)
    borders = [0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 1e-42, 2.0**-126, 88.375, -86.5]
    around = torch.arange(-40, 40, dtype=torch.int32) + torch.tensor(borders).view(torch.int32)[:, None]
    scores = torch.randn(count, generator=generator) * 30
    unit = torch.rand(count, generator=generator)
    return torch.cat([patterns.view(torch.float32), around.view(torch.float32).flatten(), scores, unit])


def same_bits(found: Tensor, expected: Tensor) -> bool:
    nan = found.isnan() & expected.isnan()
    return bool((nan | (found.view(torch.int32) == expected.view(torch.int32))).all())


def check_functions(device: str, count: int) -> None:
    x = numbers(count).to(device)
    for log, function in ((False, elementary.exp_f32), (True, elementary.log_f32)):
        y = torch.full_like(x, math.nan)
        _apply[(triton.cdiv(x.numel(), 1024 * 64),)](x, y, x.numel(), LOG=log, BLOCK=1024 * 64, enable_fp_fusion=False)
        assert same_bits(y.cpu(), function(x.cpu()))
    x = x[~x.isnan()]
    y = torch.full_like(x, math.nan)
    _apply_sum[(triton.cdiv(x.numel(), 1024 * 64),)](x, y, x.numel(), BLOCK=1024 * 64, enable_fp_fusion=False)
    x, y = x.cpu(), y.cpu()
    known = x <= elementary.EXP_OVERFLOW
    assert same_bits(y[known], (elementary.exp_f32(x[known]) + 1.0) / 8)
    assert bool(((y > 0.0) & y.isfinite()).all())


def check_sum(device: str, n: int) -> None:
    x = torch.rand(n, generator=torch.Generator().manual_seed(n)).to(device)
    expected = elementary.tree_sum(x.cpu())
    y = torch.full((1,), math.nan, device=device)
    enough = (n - 1).bit_length()
    for levels in (enough, enough + 1):  # a halving of one column changes nothing
        _sum[(1,)](x, y, n, LEVELS=levels, enable_fp_fusion=False)
        assert torch.equal(y.cpu()[0], expected)
    # The first three halvings, and the rest from the columns that they leave.
    num_columns = triton.cdiv(n, 8)
    columns = torch.full((num_columns,), math.nan, device=device)
    _sum_columns[(1,)](
        x, columns, n, num_columns, LEVELS=3, COLUMNS=triton.next_power_of_2(num_columns), enable_fp_fusion=False
    )
    _sum[(1,)](columns, y, num_columns, LEVELS=(num_columns - 1).bit_length(), enable_fp_fusion=False)
    assert torch.equal(y.cpu()[0], expected)


@interpreted
def test_functions_have_the_references_bits() -> None:
    check_functions("cpu", 300_000)


@pytest.mark.parametrize("n", LENGTHS)
@interpreted
def test_sums_have_the_references_bits(n: int) -> None:
    check_sum("cpu", n)


@pytest.mark.gpu
def test_functions_have_the_references_bits_on_a_gpu() -> None:
    check_functions("cuda", 5_000_000)


@pytest.mark.gpu
@pytest.mark.parametrize("n", LENGTHS)
def test_sums_have_the_references_bits_on_a_gpu(n: int) -> None:
    check_sum("cuda", n)
