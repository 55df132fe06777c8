"""The embedding gather against its reference, bit for bit."""

import pytest
import torch

from espalier.kernels.embedding import reference
from tests.support.bits import captured, poisoned, same_bits
from tests.support.interpret import interpreted

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def check(device: str, dtype: torch.dtype, ids_dtype: torch.dtype, rows: int, width: int, scale: float | None) -> None:
    from espalier.kernels.embedding.gather import gather

    table, token_ids = torch.randn(300, width).to(dtype), torch.randint(0, 300, (rows,), dtype=ids_dtype)
    token_ids[:: max(2, rows // 3)] = 299
    out = poisoned(rows, width, device=device)
    gather(token_ids.to(device), table.to(device), out, scale)
    assert same_bits(out, reference.gather(token_ids, table, scale))
    assert not out.isnan().any()


@pytest.mark.parametrize("dtype", FLOATS)
@interpreted
def test_interpreted(dtype: torch.dtype) -> None:
    check("cpu", dtype, torch.int32, 3, 72, None)
    check("cpu", dtype, torch.int64, 1, 1030, 72**0.5)


@interpreted
def test_an_unknown_token_is_nan() -> None:
    from espalier.kernels.embedding.gather import gather

    table, token_ids = torch.randn(10, 8), torch.tensor([3, -1, 10, 9])
    out = poisoned(4, 8)
    gather(token_ids, table, out)
    assert same_bits(out, reference.gather(token_ids, table))
    assert out[1:3].isnan().all() and torch.equal(out[[0, 3]], table[[3, 9]])


@interpreted
def test_what_does_not_fit_is_named() -> None:
    from espalier.kernels.embedding.gather import gather

    token_ids, table, out = torch.tensor([1]), torch.zeros(4, 8), torch.zeros(1, 8)
    for arguments, name in (
        ((token_ids.float(), table, out), "token_ids must"),
        ((token_ids, table.T, out), "table must"),
        ((token_ids, table, out.half()), "out must"),
    ):
        with pytest.raises(ValueError, match=name):
            gather(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "width"), [(1, 5120), (17, 576), (1000, 5119), (8192, 640)])
def test_gather(dtype: torch.dtype, rows: int, width: int) -> None:
    check("cuda", dtype, torch.int32, rows, width, None)
    check("cuda", dtype, torch.int64, rows, width, 0.7)


@pytest.mark.gpu
def test_captured_and_beyond_two_gigabytes() -> None:
    from espalier.kernels.embedding.gather import gather

    table = torch.zeros(248_320, 5120, dtype=torch.bfloat16, device="cuda")
    table[-1] = torch.randn(5120, device="cuda")
    token_ids, out = torch.tensor([248_319, 0, 248_320], device="cuda"), poisoned(3, 5120, device="cuda")
    (got,) = captured(lambda: gather(token_ids, table, out), [out])
    assert same_bits(got[0], table[-1].float()) and not got[1].any() and got[2].isnan().all()
