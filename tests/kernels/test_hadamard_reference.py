from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from espalier.kernels.hadamard.reference import butterfly, fold_rotations, hadamard_matrix, rotate_input, rotate_output

LOCAL = Path(__file__).parents[1] / "data" / "vectors" / "exl3.safetensors"


def test_rotations_are_bit_exact() -> None:
    vectors = load_file(LOCAL)
    x, scale = vectors["x.m3"], vectors["had.scale"]
    assert torch.equal(rotate_input(x, scale), vectors["had.pre_scaled_out"])
    assert torch.equal(rotate_output(x.float(), scale, torch.float16), vectors["had.post_scaled_out"])


def test_matrix_is_sylvesters() -> None:
    matrix = hadamard_matrix(torch.float64)
    i, j = 77, 101
    assert matrix[i, j] == (-1) ** bin(i & j).count("1")
    assert torch.equal(matrix, matrix.T)
    assert torch.equal(matrix @ matrix, 128 * torch.eye(128, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(128,), (1, 256), (3, 5, 384)])
def test_butterfly_transforms_each_block(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    want = x.double().view(-1, 128) @ hadamard_matrix(torch.float64)
    torch.testing.assert_close(butterfly(x).double().view(-1, 128), want, rtol=0, atol=1e-4)


def test_fold_is_the_product_of_its_factors() -> None:
    inner, suh, svh = torch.randn(256, 384, dtype=torch.float64), torch.randn(256).half(), torch.randn(384).half()

    def blocks(n: int) -> torch.Tensor:
        return torch.block_diag(*[hadamard_matrix(torch.float64)] * (n // 128)) / 128**0.5

    want = suh.double().diag() @ blocks(256) @ inner @ blocks(384) @ svh.double().diag()
    torch.testing.assert_close(fold_rotations(inner, suh, svh), want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        fold_rotations(inner.float(), suh, svh).double(), want, rtol=0, atol=2e-6 * float(want.abs().max())
    )
