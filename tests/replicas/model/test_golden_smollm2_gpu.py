"""The checks of test_golden_smollm2.py on a GPU. Needs ../shared, so the GPU runner takes it by name: `gpu_run.sh tests/replicas/model`."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.replicas.config import EngineConfig
from espalier.replicas.gpu.shard import GpuShard
from espalier.replicas.request import SamplingParams
from espalier.replicas.schedule.step import Lane
from tests.replicas.model.test_golden_smollm2 import NAME, assert_clear_tokens, read_golden
from tests.support.model_runs import StepDriver

pytestmark = pytest.mark.gpu
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def golden(shared: Path) -> dict[str, Any]:
    return read_golden(shared)


@pytest.fixture(scope="module")
def shard(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> GpuShard:
    folder = tmp_path_factory.mktemp("smollm2")
    model = shared / "models" / NAME
    return GpuShard(
        EngineConfig(
            model_path=model,
            device="cuda",
            cache_dir=folder,
            kv_tokens=8192,
            max_context=2048,
            max_lanes=8,
            batch_tokens=2048,
        )
    )


def test_tokens_logits_and_likelihood(shard: GpuShard, golden: dict[str, Any]) -> None:
    """All prompts decode in company; what each gives is compared up to its first step without a clear winner."""
    driver, prompts = StepDriver(shard), golden["prompts"]  # type: ignore[arg-type]
    (track,) = shard._tracks.values()

    def logits(index: int) -> torch.Tensor:
        return track._buffers.activations.logits[index, : shard.info.vocab_size].cpu()

    tokens: list[list[int]] = []
    for number, prompt in enumerate(prompts):
        driver.begin(number, GREEDY, prompt["n"], prompt["n"] + 64)
        sampled = driver.step([Lane(number, 0, tuple(prompt["ids"]), 1)])
        tokens.append([sampled[number][0].token_id])
        exact = prompt["exact"]["last_logits"]
        furthest = (logits(0)[torch.tensor(exact["ids"])] - torch.tensor(exact["logits"])).abs().max()
        assert furthest < 0.05, (prompt["name"], furthest)
    for done in range(1, 64):
        lanes = [Lane(i, prompt["n"] + done - 1, (tokens[i][-1],), 1) for i, prompt in enumerate(prompts)]
        for i, (token,) in driver.step(lanes).items():
            tokens[i].append(token.token_id)
    assert_clear_tokens(prompts, tokens)
    for number in range(len(prompts)):
        driver.step([], ends=(number,))

    ids = golden["text"]["ids"]
    driver.begin(99, GREEDY, len(ids), len(ids))
    total = 0.0
    for position, (token, following) in enumerate(itertools.pairwise(ids)):
        driver.step([Lane(99, position, (token,), 1)])
        total -= float(logits(0).double().log_softmax(0)[following])
    assert abs(total / (len(ids) - 1) / 3.09492 - 1) < 1e-4
