"""The canary: silent while the answer stays, loud when it changes, and its own record for other weights or arithmetic."""

from dataclasses import replace
from pathlib import Path

import pytest

from espalier.replicas.config import EngineConfig
from espalier.replicas.errors import CheckpointError
from espalier.replicas.model.canary import check_canary
from espalier.replicas.shard import Shard
from tests.support.tiny import make_tiny_checkpoint


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    folder = make_tiny_checkpoint(tmp_path / "model")
    return Shard(EngineConfig(model_path=folder, cache_dir=tmp_path / "cache", kv_tokens=256, cpu_threads=1))


def test_the_same_answer_every_time(shard: Shard, tmp_path: Path) -> None:
    first = check_canary(shard, tmp_path / "cache")
    assert check_canary(shard, tmp_path / "cache") == first
    assert len(first) == 64
    (record,) = (tmp_path / "cache" / "records").glob("canary-*.json")
    assert shard.info.weights_id in record.name
    assert not shard._sequences


def test_a_changed_weight_in_memory_is_noticed(shard: Shard, tmp_path: Path) -> None:
    check_canary(shard, tmp_path / "cache")
    shard._decoder.layers[1].down.weight[0, 5, 5] += 0.01
    with pytest.raises(CheckpointError, match="canary"):
        check_canary(shard, tmp_path / "cache")


def test_other_arithmetic_has_its_own_record(shard: Shard, tmp_path: Path) -> None:
    check_canary(shard, tmp_path / "cache")
    shard.info = replace(shard.info, numerics_id="cpu1-fp32-00000000")
    shard._decoder.layers[1].down.weight[0, 5, 5] += 0.01
    check_canary(shard, tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "records").glob("canary-*.json"))) == 2


def test_an_unreadable_record_is_named(shard: Shard, tmp_path: Path) -> None:
    check_canary(shard, tmp_path / "cache")
    (record,) = (tmp_path / "cache" / "records").glob("canary-*.json")
    record.write_text("{")
    with pytest.raises(CheckpointError, match=record.name):
        check_canary(shard, tmp_path / "cache")


def test_a_context_too_short_for_it_has_its_own_record(shard: Shard, tmp_path: Path) -> None:
    check_canary(shard, tmp_path / "cache")
    shard.info = replace(shard.info, max_context=9)
    short = check_canary(shard, tmp_path / "cache")
    assert check_canary(shard, tmp_path / "cache") == short
