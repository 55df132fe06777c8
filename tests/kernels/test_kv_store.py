"""New keys and values in the paged cache, bit for bit, and nothing else touched."""

import functools

import pytest
import torch

from tests.support.bits import captured, poisoned, same_bits
from tests.support.interpret import interpreted

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def check(
    device: str, dtype: torch.dtype, cache_dtype: torch.dtype, rows: int, heads: int, head_dim: int, block_size: int
) -> None:
    from espalier.kernels.attention.store import store_kv

    k, v = torch.randn(rows, 2 * heads, head_dim + 8).to(dtype)[..., :head_dim].chunk(2, dim=1)
    num_blocks = rows // block_size + 3
    slots = torch.randperm(num_blocks * block_size)[:rows]
    slots[rows // 2 :: 3] = -1
    shape = (num_blocks, heads, block_size, head_dim)
    keys, values = (poisoned(*shape, dtype=cache_dtype, device=device) for _ in range(2))
    wanted = [poisoned(*shape, dtype=cache_dtype) for _ in range(2)]
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            for cached, x in zip(wanted, (k, v), strict=True):
                cached[slot // block_size, :, slot % block_size] = x[row].to(cache_dtype)
    k, v, slots = k.to(device), v.to(device), slots.to(device)
    call = functools.partial(store_kv, k, v, keys, values, slots)
    call()
    eager = [keys.clone(), values.clone()]
    for got, want in zip(eager, wanted, strict=True):
        assert same_bits(got, want)
    if device == "cuda":
        for got, want in zip(captured(call, [keys, values]), wanted, strict=True):
            assert same_bits(got, want)


@pytest.mark.parametrize("dtype", FLOATS)
@interpreted
def test_interpreted(dtype: torch.dtype) -> None:
    check("cpu", dtype, torch.float16, 5, 3, 64, 16)
    check("cpu", dtype, torch.float32, 1, 5, 96, 32)


@interpreted
def test_what_does_not_fit_is_named() -> None:
    from espalier.kernels.attention.store import store_kv

    k, cache, slots = torch.zeros(2, 1, 64), torch.zeros(3, 1, 16, 64), torch.tensor([0, 1])
    for arguments, name in (
        ((k, k[:1], cache, cache, slots), "v must"),
        ((k, k, cache[:, :, :, :32], cache, slots), "keys must"),
        ((k, k, cache, cache.half(), slots), "values must"),
        ((k, k, cache, cache, slots.int()), "slots must"),
    ):
        with pytest.raises(ValueError, match=name):
            store_kv(*arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1, 64, 16), (37, 8, 128, 64), (1000, 3, 96, 128), (17, 4, 256, 32)])
def test_store(cache_dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    for dtype in FLOATS:
        check("cuda", dtype, cache_dtype, *shape)
