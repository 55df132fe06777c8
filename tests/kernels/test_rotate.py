"""Rotation kernels against the reference, bit for bit: interpreted at small shapes, compiled at all of them."""

import functools

import pytest
import torch

from espalier.kernels.hadamard import reference
from espalier.kernels.linear.reference import rotate_back as reference_back
from tests.support.bits import captured, poisoned, same_bits
from tests.support.interpret import interpreted

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def check_input(device: str, dtype: torch.dtype, members: int, rows: int, width: int, in_features: int) -> None:
    from espalier.kernels.hadamard.rotate import rotate_input

    # A view of wider rows: strides are the caller's.
    x = (torch.randn(rows, width + 24) * 3).to(dtype)[:, :width]
    suh = torch.randn(members, in_features).half()
    out = poisoned(members, rows, in_features, dtype=torch.float16, device=device)
    rotate_input(x.to(device), suh.to(device), out)
    for member in range(members):
        assert same_bits(out[member], reference.rotate_input(x, suh[member]))


def check_back(device: str, dtype: torch.dtype, rows: int, out_features: int, with_bias: bool) -> None:
    from espalier.kernels.hadamard.rotate import rotate_back

    sums, svh, bias = torch.randn(rows, out_features) * 3, torch.randn(out_features).half(), torch.randn(out_features)
    out = poisoned(rows, out_features, dtype=dtype, device=device)
    rotate_back(sums.to(device), svh.to(device), bias.to(device) if with_bias else None, out)
    assert same_bits(out, reference_back(sums, svh, bias if with_bias else None, dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1, 128, 128), (2, 3, 300, 384), (1, 35, 256, 256)])
@interpreted
def test_input_interpreted(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    check_input("cpu", dtype, *shape)


# The interpreter truncates to bf16 where hardware rounds: bf16 outputs are tested on a GPU only.
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "with_bias"), [(1, True), (33, False)])
@interpreted
def test_back_interpreted(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    check_back("cpu", dtype, rows, 384, with_bias)


@interpreted
def test_what_does_not_fit_is_named() -> None:
    from espalier.kernels.hadamard.rotate import rotate_input

    x, suh, out = torch.zeros(2, 128).half(), torch.zeros(1, 128).half(), torch.zeros(1, 2, 128).half()
    for arguments, name in (
        ((torch.zeros(2, 256).half(), suh, out), "x must"),
        ((x.double(), suh, out), "x must"),
        ((x, suh.float(), out), "suh must"),
        ((x, suh, out[:, :1]), "out must"),
    ):
        with pytest.raises(ValueError, match=name):
            rotate_input(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 5120, 5120),
        (3, 3, 576, 640),
        (2, 31, 128, 128),
        (2, 32, 5100, 5120),
        (1, 129, 17408, 17408),
        (1, 1000, 640, 640),
    ],
)
def test_input(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    check_input("cuda", dtype, *shape)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 33, 300])
def test_back(dtype: torch.dtype, rows: int, with_bias: bool) -> None:
    check_back("cuda", dtype, rows, 1152, with_bias)


@pytest.mark.gpu
def test_no_row_depends_on_the_call() -> None:
    from espalier.kernels.hadamard.rotate import rotate_input

    x, suh = torch.randn(8192, 5120, device="cuda").half(), torch.randn(1, 5120, device="cuda").half()
    whole = poisoned(1, 8192, 5120, dtype=torch.float16, device="cuda")
    rotate_input(x, suh, whole)
    for first, last in ((0, 1), (200, 201), (7, 24), (9, 73), (9, 74), (64, 192), (8191, 8192)):
        part = poisoned(1, last - first, 5120, dtype=torch.float16, device="cuda")
        rotate_input(x[first:last], suh, part)
        assert same_bits(part, whole[:, first:last])
        (again,) = captured(functools.partial(rotate_input, x[first:last], suh, part), [part])
        assert same_bits(again, whole[:, first:last])
