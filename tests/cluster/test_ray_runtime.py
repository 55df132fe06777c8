"""RayRuntime: a Ray that cannot be started is told in one sentence, and leaves nothing behind."""

from pathlib import Path
from typing import Any

import pytest
import ray

from espalier.cluster import ray_runtime
from espalier.cluster.ray_runtime import RayOptions, RayRuntime
from espalier.replicas.errors import EngineError


def test_a_ray_that_cannot_start_is_told_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def init(**options: Any) -> None:
        asked.update(options)
        raise Exception("the node timed out")

    # The session's cluster, if there is one, lives in this process too: only what is asked of Ray is looked at.
    shut_down: list[bool] = []
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: shut_down.append(True))
    monkeypatch.setattr(ray_runtime.tempfile, "mkdtemp", lambda **_: str(tmp_path / "ray"))
    (tmp_path / "ray").mkdir()
    with pytest.raises(EngineError, match="Ray cannot start: the node timed out"):
        RayRuntime(RayOptions(num_gpus=3), cpus_asked=1.5)
    assert not (tmp_path / "ray").exists()
    assert shut_down
    assert asked["num_gpus"] == 3 and asked["num_cpus"] >= 2
