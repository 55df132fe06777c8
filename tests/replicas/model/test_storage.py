"""How much cache a machine gets, which context fits in it, and that stores land where later reads look."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from espalier.kernels.rope.frequencies import RopeConfig
from espalier.replicas.cache.storage import KVCache, kv_bytes_per_token, machine_memory_bytes, plan_memory
from espalier.replicas.config import EngineConfig, resolved
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.model.config import ModelConfig

MODEL = ModelConfig(
    family="llama",
    num_layers=2,
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=256,
    vocab_size=512,
    max_positions=4096,
    norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    tie_word_embeddings=False,
    qk_norm=False,
    quant=None,
    eos_token_ids=(),
)
CONFIG = resolved(EngineConfig(model_path=Path("m"), max_lanes=4))
GIB = 2**30


def test_bytes_per_token() -> None:
    assert kv_bytes_per_token(MODEL, "fp32") == 2 * 2 * 2 * 64 * 4
    assert kv_bytes_per_token(MODEL, "fp16") == 2 * 2 * 2 * 64 * 2


def test_defaults_hold_every_lane_at_full_length_if_memory_allows() -> None:
    assert plan_memory(CONFIG, MODEL, 64 * GIB) == (4 * 4096 // 16, 4096)
    assert plan_memory(replace(CONFIG, max_lanes=100), MODEL, 64 * GIB) == (65_536 // 16, 4096)
    assert plan_memory(replace(CONFIG, max_context=100), MODEL, 64 * GIB) == (400 // 16, 100)
    # A quarter of 16 MiB is 2048 tokens of 2 KiB, and then no longer context fits either.
    assert plan_memory(CONFIG, MODEL, 16 * 2**20) == (128, 2048)


def test_kv_tokens_are_taken_as_given() -> None:
    assert plan_memory(replace(CONFIG, kv_tokens=1000), MODEL, GIB) == (62, 992)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_context": 4097}, "max_context"),
        ({"max_context": 2000, "kv_tokens": 1000}, "max_context"),
        ({"kv_tokens": 10**7}, "kv_tokens"),
    ],
)
def test_what_cannot_be_met_is_named(changes: dict[str, int], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plan_memory(replace(CONFIG, **changes), MODEL, GIB)
    assert caught.value.param == param


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_stores_land_in_their_slots(dtype: str) -> None:
    cache = KVCache(MODEL, 3, 16, dtype)  # type: ignore[arg-type]
    assert len(cache.keys) == 2
    assert not any(layer.any() for layer in (*cache.keys, *cache.values))
    k, v = torch.randn(8, 2, 64), torch.randn(8, 2, 64)
    # Position 5 of block 2 and position 0 of block 1; six rows of padding.
    slots = torch.tensor([[(2 * 2 + h) * 16 + 5 for h in range(2)], [(1 * 2 + h) * 16 for h in range(2)]])
    cache.store(1, slots, k, v)
    assert torch.equal(cache.keys[1][2, :, 5], k[0].to(cache.keys[1].dtype))
    assert torch.equal(cache.values[1][1, :, 0], v[1].to(cache.keys[1].dtype))
    assert cache.keys[1].count_nonzero() == 2 * 2 * 64
    assert not cache.keys[0].any()


def test_the_machine_has_memory() -> None:
    assert machine_memory_bytes() > 2**27
