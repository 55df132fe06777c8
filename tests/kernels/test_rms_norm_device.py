"""The RMS norm kernel against the reference, bit for bit: every kind of width, both kinds of weights, heads inside rows."""

import functools

import numpy as np
import pytest
import torch

from espalier.kernels.norm.reference import rms_norm, rms_norm_ieee
from tests.support.bits import captured, poisoned, same_bits
from tests.support.interpret import interpreted

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def check(device: str, x_dtype: torch.dtype, out_dtype: torch.dtype, shape: tuple[int, ...], unit_offset: bool) -> None:
    from espalier.kernels.norm import rms_norm as kernel

    width = shape[-1]
    x = (torch.randn(*shape[:-1], width + 8) * 3).to(x_dtype)[..., :width]
    weight = (torch.rand(width) - 0.5).to(x_dtype)
    out = poisoned(*shape, dtype=out_dtype, device=device)
    kernel.rms_norm(x.to(device), weight.to(device), 1e-6, out, unit_offset=unit_offset)
    assert same_bits(out, rms_norm_ieee(x, weight, 1e-6, unit_offset=unit_offset).to(out_dtype))


@pytest.mark.parametrize("width", [1, 2, 7, 63, 64, 96, 576])
@interpreted
def test_interpreted(width: int) -> None:
    for dtype in FLOATS:
        check("cpu", dtype, torch.float32, (3, width), unit_offset=False)
        check("cpu", dtype, torch.float16, (2, 2, width), unit_offset=True)


def test_the_reference_is_near_the_exact_norm_and_the_cpu_path() -> None:
    x, ones = torch.randn(500, 64) * torch.rand(500, 1).mul(9).exp(), torch.ones(64)
    exact = x.double() / torch.sqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(rms_norm_ieee(x, ones, 1e-6).double(), exact, rtol=5e-7, atol=0)
    torch.testing.assert_close(rms_norm(x, ones, 1e-6), rms_norm_ieee(x, ones, 1e-6), rtol=4e-7, atol=0)


def test_the_root_is_rounded_once() -> None:
    x = torch.rand(20_000, 1) * 9 + 0.1
    root = np.sqrt((x * x).numpy() + np.float32(1e-6))
    want = x.numpy() * (np.float32(1) / root)
    assert np.array_equal(rms_norm_ieee(x, torch.ones(1), 1e-6).numpy(), want)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "width", [1, 63, 64, 80, 96, 128, 256, 576, 640, 896, 1000, 2560, 3584, 4096, 5100, 5120, 8192, 12288]
)
def test_widths(width: int) -> None:
    check("cuda", FLOATS[width % 3], FLOATS[width // 2 % 3], (5, width), unit_offset=False)
    check("cuda", torch.bfloat16, torch.float32, (3, 7, width), unit_offset=True)


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_dtypes(x_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    check("cuda", x_dtype, out_dtype, (5, 1536), unit_offset=False)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 5120])
def test_no_row_depends_on_the_call(width: int) -> None:
    from espalier.kernels.norm import rms_norm as kernel

    x, weight = torch.randn(2000, width, device="cuda"), torch.rand(width, device="cuda")
    whole = poisoned(2000, width, device="cuda")
    kernel.rms_norm(x, weight, 1e-6, whole)
    for first, last in ((0, 1), (200, 201), (7, 24), (1999, 2000)):
        part = poisoned(last - first, width, device="cuda")
        kernel.rms_norm(x[first:last], weight, 1e-6, part)
        assert same_bits(part, whole[first:last])
        (again,) = captured(functools.partial(kernel.rms_norm, x[first:last], weight, 1e-6, part), [part])
        assert same_bits(again, whole[first:last])
