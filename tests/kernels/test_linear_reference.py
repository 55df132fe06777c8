"""The definition of the linear's arithmetic: accurate, and each of its steps where it says."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import RATES, Exl3Tensors
from espalier.kernels.exl3.reference import decode_inner, linear_fp64
from espalier.kernels.linear.reference import add_in_order, linear, partial_sums, rotate_back
from tests.support.linears import random_linear, relative_error

LOCAL = Path(__file__).parents[1] / "data" / "vectors" / "exl3.safetensors"
ACCURACY = 4.6e-4  # exllamav3's fp16 path, set by the rounding of the rotated input
CASES = [(rate, Codebook.MUL1) for rate in RATES] + [(4.0, Codebook.MCG), (3.0, Codebook.THREE_INST)]


@pytest.mark.parametrize(("rate", "codebook"), CASES, ids=lambda value: f"{value}")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=lambda dtype: f"{dtype}"[6:])
def test_accuracy(rate: float, codebook: Codebook, dtype: torch.dtype) -> None:
    case = random_linear(640, 128, rate, codebook)
    x = torch.randn(5, 640).to(dtype)
    want = linear_fp64(x, case)
    for chain in (torch.float32, torch.float64):
        assert relative_error(linear(x, [case], [None], torch.float32, chain), want) < ACCURACY
    # The last rounding: 2^-12 of fp16 and 2^-9 of bf16 at most, on top.
    assert relative_error(linear(x, [case], [None], torch.float16), want) < ACCURACY + 2.0**-12
    assert relative_error(linear(x, [case], [None], torch.bfloat16), want) < ACCURACY + 2.0**-9


@pytest.mark.parametrize("codebook", list(Codebook))
def test_accuracy_on_the_vectors(shared: Path, codebook: Codebook) -> None:
    vectors = load_file(shared / "vectors" / f"{codebook}.safetensors")
    common = load_file(shared / "vectors" / "common.safetensors")
    names = [name.removesuffix(".trellis") for name in vectors if name.endswith(".trellis")]
    assert len(names) >= 7
    for name in names:
        case = Exl3Tensors(vectors[f"{name}.trellis"], vectors[f"{name}.suh"], vectors[f"{name}.svh"], codebook)
        for rows in (1, 3, 17, 64):
            x = common[f"x.m{rows}"]
            got = linear(x, [case], [None], torch.float32)
            assert relative_error(got, linear_fp64(x, case)) < ACCURACY, (name, rows)


def test_local_vectors() -> None:
    vectors = load_file(LOCAL)
    names = [name.removesuffix(".y_linear_fp32.m3") for name in vectors if name.endswith(".y_linear_fp32.m3")]
    assert names
    for name in names:
        codebook = Codebook(name.partition(".")[0])
        case = Exl3Tensors(vectors[f"{name}.trellis"], vectors[f"{name}.suh"], vectors[f"{name}.svh"], codebook)
        got = linear(vectors["x.m3"], [case], [None], torch.float32)
        assert relative_error(got, vectors[f"{name}.y_linear_fp32.m3"].double()) < ACCURACY, name


def test_partial_sums_are_chains_of_sixteen() -> None:
    x, inner = torch.randn(2, 640).half(), torch.randn(640, 16).half()
    got = partial_sums(x, inner)
    assert got.shape == (2, 2, 16)
    total = torch.zeros(2, 16)
    for k in range(256, 640, 16):
        total = (total.double() + x[:, k : k + 16].double() @ inner[k : k + 16].double()).float()
    assert torch.equal(got[1], total)
    assert relative_error(got, partial_sums(x, inner, torch.float64).double()) < 1e-6


def test_partial_sums_are_added_left_to_right() -> None:
    partials = torch.tensor([1e8, 1.0, -1e8, 1.0]).view(4, 1, 1)
    assert add_in_order(partials).item() == 1.0
    assert add_in_order(partials.flip(0)).item() == 0.0


def test_output_is_rounded_once() -> None:
    total, svh, bias = torch.randn(4, 128), torch.randn(128).half(), torch.randn(128)
    full = rotate_back(total, svh, bias, torch.float32)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(rotate_back(total, svh, bias, dtype), full.to(dtype))
    assert torch.equal(rotate_back(total, svh, None, torch.float32) + bias, full)


def test_members_stand_side_by_side() -> None:
    x = torch.randn(3, 256).half()
    members = [random_linear(256, 128, 4.0, Codebook.MUL1), random_linear(256, 256, 2.5, Codebook.MUL1, 1)]
    bias = torch.randn(256)
    together = linear(x, members, [None, bias])
    assert torch.equal(together[:, :128], linear(x, members[:1], [None]))
    assert torch.equal(together[:, 128:], linear(x, members[1:], [bias]))


def test_columns_in_parts_equal_the_whole() -> None:
    case, x = random_linear(640, 256, 3.0, Codebook.MCG), torch.randn(2, 640).half()
    halves = [
        Exl3Tensors(
            case.trellis[:, at : at + 8].contiguous(), case.suh, case.svh[at * 16 : at * 16 + 128], case.codebook
        )
        for at in (0, 8)
    ]
    assert torch.equal(linear(x, halves, [None, None]), linear(x, [case], [None]))
    assert torch.equal(torch.cat([decode_inner(half) for half in halves], 1), decode_inner(case))
