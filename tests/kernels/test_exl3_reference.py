from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import Exl3Tensors
from espalier.kernels.exl3.reference import decode_inner, effective_weight, linear, linear_fp64

LOCAL = Path(__file__).parents[1] / "data" / "vectors" / "exl3.safetensors"


def cases(tensors: dict[str, torch.Tensor]) -> dict[str, Exl3Tensors]:
    names = sorted(name.removesuffix(".trellis") for name in tensors if name.endswith(".trellis"))
    return {
        name: Exl3Tensors(
            tensors[f"{name}.trellis"],
            tensors[f"{name}.suh"],
            tensors[f"{name}.svh"],
            Codebook(name.partition(".")[0]),
        )
        for name in names
    }


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def check_case(name: str, case: Exl3Tensors, vectors: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor]) -> int:
    """Everything the vectors say about one linear; returns how many products were compared."""
    assert name == f"{case.codebook}.k{case.rate:g}"
    inner = decode_inner(case)
    assert torch.equal(inner.view(torch.int16), vectors[f"{name}.inner"].view(torch.int16)), name
    compared = 0
    for rows, x in inputs.items():
        for key, dtype, bound in (
            (f"y_linear.{rows}", torch.float16, 5.5e-4),
            (f"y_linear_fp32.{rows}", torch.float32, 2.5e-4),
        ):
            if (want := vectors.get(f"{name}.{key}")) is not None:
                # The tuned GEMM's own sums, or for few rows the fp16 accumulators of the small kernel.
                assert relative_error(linear(x, case, dtype=dtype), want) < bound, (name, key)
                assert relative_error(linear_fp64(x, case), want) < 6e-4, (name, key)
                compared += 1
    return compared


def test_local_vectors() -> None:
    vectors = load_file(LOCAL)
    found = cases(vectors)
    assert {case.codebook for case in found.values()} == set(Codebook)
    compared = sum(check_case(name, case, vectors, {"m3": vectors["x.m3"]}) for name, case in found.items())
    assert compared == 4


@pytest.mark.parametrize(("codebook", "num_cases"), [("3inst", 7), ("mcg", 7), ("mul1", 9)])
def test_all_vectors(shared: Path, codebook: str, num_cases: int) -> None:
    vectors = load_file(shared / "vectors" / f"{codebook}.safetensors")
    common = load_file(shared / "vectors" / "common.safetensors")
    inputs = {f"m{m}": common[f"x.m{m}"] for m in (1, 3, 17, 64)}
    found = cases(vectors)
    assert len(found) == num_cases
    for name, case in found.items():
        assert check_case(name, case, vectors, inputs) == 5
        if (full := vectors.get(f"{name}.full")) is not None:
            assert relative_error(effective_weight(case), full) < 1.1e-3  # that kernel folds in fp16


def random_case(rate_words: int, num_in: int = 256, num_out: int = 512) -> Exl3Tensors:
    trellis = torch.randint(-32768, 32768, (num_in // 16, num_out // 16, rate_words)).to(torch.int16)
    return Exl3Tensors(trellis, torch.randn(num_in).half(), (torch.randn(num_out) * 0.02).half(), Codebook.MUL1)


@pytest.mark.parametrize("rate_words", [40, 64, 96])
def test_fp32_fold_is_accurate(rate_words: int) -> None:
    case = random_case(rate_words)
    assert relative_error(effective_weight(case), effective_weight(case, torch.float64)) < 3e-7


@pytest.mark.parametrize("parts", [2, 4])
def test_columns_do_not_depend_on_the_split(parts: int) -> None:
    case = random_case(64)
    width = case.out_features // parts
    pieces = [
        effective_weight(
            Exl3Tensors(
                case.trellis[:, i * width // 16 : (i + 1) * width // 16],
                case.suh,
                case.svh[i * width : (i + 1) * width],
                case.codebook,
            )
        )
        for i in range(parts)
    ]
    assert torch.equal(torch.cat(pieces, dim=1), effective_weight(case))


def test_wide_linears_decode_in_chunks() -> None:
    # Wider than one chunk, and not a multiple of it.
    case = random_case(32, num_in=128, num_out=2048 + 128)
    tail = Exl3Tensors(case.trellis[:, 128:], case.suh, case.svh[2048:], case.codebook)
    assert torch.equal(decode_inner(case)[:, 2048:], decode_inner(tail))
    assert torch.equal(effective_weight(case)[:, 2048:], effective_weight(tail))


def test_bias_is_added_last_in_the_outputs_dtype() -> None:
    case, x, bias = random_case(64), torch.randn(3, 256).half(), torch.randn(512).half()
    assert torch.equal(linear(x, case, bias), linear(x, case) + bias)
    assert torch.equal(linear_fp64(x, case, bias), linear_fp64(x, case) + bias.double())
