"""A weight byte that has flipped since the first load: the replica stays up and tells, the gateway is not ready and tells, nothing is served."""

import asyncio
from pathlib import Path

import pytest

from espalier.cluster.catalog import ServedText
from espalier.cluster.config import ClusterConfig, ServedModel
from espalier.cluster.engine_loader import load_engine
from espalier.cluster.gateway import Gateway
from espalier.cluster.metrics import ClusterMetrics
from espalier.cluster.replica import EngineReplica
from espalier.cluster.served_text import load_text
from espalier.replicas.config import EngineConfig
from espalier.replicas.errors import DrainingError
from tests.support.local_link import LocalLink, until
from tests.support.tiny import make_tiny_checkpoint


def _flip_last_byte(checkpoint: Path) -> None:
    [file] = checkpoint.glob("*.safetensors")
    with file.open("r+b") as weights:
        weights.seek(-1, 2)
        last = weights.read(1)[0]
        weights.seek(-1, 2)
        weights.write(bytes([last ^ 1]))


def test_a_flipped_weight_byte_is_not_served(tmp_path: Path) -> None:
    engine = EngineConfig(
        model_path=make_tiny_checkpoint(tmp_path / "checkpoint"),
        max_context=64,
        kv_tokens=256,
        max_lanes=2,
        batch_tokens=32,
        cache_dir=tmp_path / "cache",
    )
    model = ServedModel(name="tiny", engine=engine)

    async def readiness_of(text: ServedText) -> tuple[bool, str]:
        replica = EngineReplica(model, None, load_engine)
        gateway = Gateway(ClusterConfig(models=(model,)), {"tiny": text}, ClusterMetrics(version="0"))
        gateway.fleet.add("tiny", LocalLink("replica-0", replica))
        try:
            await until(lambda: gateway.fleet.all()[0].load is not None or gateway.fleet.all()[0].failure is not None)
            ready, report = await gateway.readiness()
            if not ready:
                with pytest.raises(DrainingError, match="bytes"):
                    gateway.text("tiny")
            return ready, report["models"]["tiny"].get("failure", "")
        finally:
            await gateway.fleet.close()
            replica.__del__()

    text = load_text(model)
    assert asyncio.run(readiness_of(text)) == (True, "")
    _flip_last_byte(engine.model_path)
    ready, failure = asyncio.run(readiness_of(text))
    assert ready is False
    assert "safetensors" in failure
