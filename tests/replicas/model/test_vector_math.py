"""No vector function of the CPU is called for the first time by several threads: its first call in loading and in rounds is of one number.

The race itself shows in one of some hundred fresh processes on a crowded machine, so what is tested is what makes it impossible.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from espalier.replicas.config import EngineConfig
from espalier.replicas.gpu.load import load_network
from espalier.replicas.model.canary import check_canary
from espalier.replicas.model.checkpoint import open_checkpoint
from espalier.replicas.model.vector_math import settle_vector_math
from espalier.replicas.shard import Shard
from tests.support.tiny import TinyArchitecture, make_tiny_checkpoint

# What torch gives to oneMKL's vector functions.
VECTOR_FUNCTIONS = {
    *("exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "sqrt", "erf", "erfc", "erfinv"),
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "sin", "sinh", "tan", "tanh"),
}


class FirstCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes of each vector function and dtype how many numbers its first call is of."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[tuple[str, torch.dtype], int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if name in VECTOR_FUNCTIONS:
            self.sizes.setdefault((name, args[0].dtype), args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_first_calls_are_of_one_number(architecture: TinyArchitecture, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "model", architecture=architecture)
    with FirstCalls() as calls:
        shard = Shard(EngineConfig(model_path=folder, cache_dir=tmp_path / "cache", kv_tokens=256, cpu_threads=1))
        check_canary(shard, tmp_path / "cache")
    assert {"exp", "sqrt", "cos", "sin"} <= {name for name, _ in calls.sizes}
    assert set(calls.sizes.values()) == {1}, calls.sizes


def test_loads_at_once_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[int] = []

    def alone(x: torch.Tensor) -> torch.Tensor:
        inside.append(1)
        together = len(inside)
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))  # lets go of the interpreter
        inside.pop()
        assert together == 1
        return x

    monkeypatch.setattr("espalier.replicas.model.vector_math._FUNCTIONS", ((alone, torch.float32),) * 50)
    with ThreadPoolExecutor(4) as threads:
        for load in [threads.submit(settle_vector_math) for _ in range(8)]:
            load.result()


def test_a_gpus_tables_are_made_so_too(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_checkpoint(tmp_path / "model"))
    with FirstCalls() as calls:
        load_network(checkpoint, torch.device("cpu"), max_context=4096)
    assert {"cos", "sin"} <= {name for name, _ in calls.sizes}
    assert set(calls.sizes.values()) == {1}, calls.sizes
