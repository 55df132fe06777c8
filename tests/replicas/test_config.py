"""EngineConfig: what is refused by name, and what the device decides."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from espalier.replicas.config import EngineConfig, ResolvedConfig, resolved
from espalier.replicas.errors import InvalidRequestError

CPU = EngineConfig(model_path=Path("m"))
GPU = EngineConfig(model_path=Path("m"), device="cuda")


def test_what_is_left_open_is_decided_by_the_device() -> None:
    for config, expected in ((CPU, ("fp32", 16, 256)), (GPU, ("fp16", 64, 4096))):
        full = resolved(config)
        assert (full.kv_dtype, full.max_lanes, full.batch_tokens) == expected
        assert resolved(full) == full


def test_what_was_said_stays() -> None:
    said = replace(GPU, kv_dtype="bf16", max_lanes=7, batch_tokens=9, tracks=2, decode_gap_ms=3.5, memory_share=0.5)
    full = resolved(said)
    assert isinstance(full, ResolvedConfig)
    assert all(getattr(full, field.name) == getattr(said, field.name) for field in fields(EngineConfig))


def test_more_lanes_than_rows_by_default_get_rows() -> None:
    assert resolved(replace(CPU, max_lanes=1000)).batch_tokens == 1000


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (CPU, {"kv_dtype": "fp8"}),
        (GPU, {"kv_dtype": "fp32"}),
        (CPU, {"max_lanes": 0}),
        (CPU, {"batch_tokens": 15}),
        (GPU, {"batch_tokens": 63}),
        (CPU, {"max_lanes": 9, "batch_tokens": 8}),
        (CPU, {"tracks": 0}),
        (CPU, {"tracks": 3}),
        (CPU, {"decode_gap_ms": 0.0}),
        (CPU, {"host_kv_gb": -0.5}),
        (GPU, {"prefix_cache": False, "host_kv_gb": 1.0}),
        (CPU, {"memory_share": 0.0}),
        (CPU, {"memory_share": 1.1}),
        (CPU, {"memory_share": 0.5}),
        (CPU, {"cuda_graphs": False}),
        (CPU, {"nvtx": True}),
        (CPU, {"max_steps_in_flight": 3}),
        (CPU, {"block_size": 8}),
    ],
)
def test_refused_by_name(config: EngineConfig, changes: dict[str, object]) -> None:
    name = list(changes)[-1]
    with pytest.raises(InvalidRequestError, match=f"^{name}: ") as caught:
        replace(config, **changes)  # type: ignore[arg-type]
    assert caught.value.param == name
