"""The tiny reference checkpoints: logits of an independent implementation, cut in any way, and its greedy tokens."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from espalier.replicas.config import EngineConfig
from espalier.replicas.request import SamplingParams
from espalier.replicas.shard import Shard
from tests.support.model_runs import StepDriver, prompt_logits

# (folder, config file, golden file)
MODELS = [
    ("llama", "config.json", "golden"),
    ("qwen2", "config.json", "golden"),
    ("qwen3", "config.json", "golden"),
    ("qwen3", "config_yarn.json", "golden_yarn"),
]
CUTS = {1: [[1]], 17: [[17], [1] * 17, [9, 8]], 130: [[130], [64, 66], [1, 7, 8, 9, 105], [129, 1]]}


IDS = [f"{name}-{golden}" for name, _, golden in MODELS]


@pytest.fixture(scope="module", params=MODELS, ids=IDS)
def model(
    request: pytest.FixtureRequest, shared: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Shard, dict[str, torch.Tensor]]:
    name, config, golden = request.param
    source, folder = shared / "models" / "tiny" / name, tmp_path_factory.mktemp(name)
    shutil.copy(source / "model.safetensors", folder / "model.safetensors")
    # The yarn config's limit is 128 positions, the golden sequence has 130; the limit itself enters no formula.
    values = json.loads((source / config).read_text()) | {"max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(values))
    shard = Shard(EngineConfig(model_path=folder, cache_dir=folder / "cache", kv_tokens=1024, cpu_threads=1))
    return shard, load_file(source / f"{golden}.safetensors")


@pytest.mark.parametrize("length", [1, 17, 130])
def test_logits(model: tuple[Shard, dict[str, torch.Tensor]], length: int) -> None:
    shard, golden = model
    token_ids, expected = golden[f"ids_{length}"].tolist(), golden[f"logits_{length}"]
    found = [prompt_logits(shard, token_ids, cuts) for cuts in CUTS[length]]
    assert (found[0] - expected).norm() / expected.norm() < 1e-5
    for other in found[1:]:
        assert torch.equal(other, found[0])


@pytest.mark.parametrize("model", MODELS[:3], ids=IDS[:3], indirect=True)  # the yarn golden has logits only
def test_greedy_tokens(model: tuple[Shard, dict[str, torch.Tensor]]) -> None:
    shard, golden = model
    token_ids = golden["greedy_ids"].tolist()
    tokens = StepDriver(shard).generate(token_ids[:17], SamplingParams(temperature=0.0, max_tokens=48), 48)
    assert tokens == token_ids[17:]
