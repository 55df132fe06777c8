"""A third party's EXL3 checkpoint of a real model against its float64 run: greedy tokens, logits, likelihood of a text."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.replicas.config import EngineConfig
from espalier.replicas.request import SamplingParams
from espalier.replicas.schedule.step import Lane
from espalier.replicas.shard import Shard
from tests.support.model_runs import StepDriver, prompt_logits

NAME = "smollm2-135m-instruct-exl3-4.0bpw"
ALL_EQUAL = ("chat_short", "code_fib", "chat_long")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def read_golden(shared: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((shared / "models" / "golden" / f"{NAME}.json").read_text())
    return values


def assert_clear_tokens(prompts: Sequence[dict[str, Any]], tokens: Sequence[list[int]]) -> None:
    """What each prompt gave is the float64 run's, up to its first step without a clear winner."""
    for prompt, found in zip(prompts, tokens, strict=True):
        margins = [math.inf] * 64 if prompt["name"] in ALL_EQUAL else prompt["exl3_fp16"]["greedy_margins"]
        clear = next((step for step, margin in enumerate(margins) if margin < 0.05), 64)
        assert found[:clear] == prompt["exact"]["greedy_ids"][:clear], prompt["name"]


@pytest.fixture(scope="module")
def golden(shared: Path) -> dict[str, Any]:
    return read_golden(shared)


@pytest.fixture(scope="module")
def shard(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Shard:
    cache_dir = tmp_path_factory.mktemp("smollm2")
    return Shard(EngineConfig(model_path=shared / "models" / NAME, cache_dir=cache_dir, kv_tokens=4096, cpu_threads=1))


def test_greedy_tokens(shard: Shard, golden: dict[str, Any]) -> None:
    """All prompts decode in company; what each gives is compared up to its first step without a clear winner."""
    driver, prompts = StepDriver(shard), golden["prompts"]
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    tokens: list[list[int]] = []
    for number, prompt in enumerate(prompts):
        driver.begin(number, params, prompt["n"], prompt["n"] + 64)
        sampled = driver.step([Lane(number, 0, tuple(prompt["ids"]), 1)])
        tokens.append([sampled[number][0].token_id])
    for done in range(1, 64):
        lanes = [Lane(i, prompt["n"] + done - 1, (tokens[i][-1],), 1) for i, prompt in enumerate(prompts)]
        for i, (token,) in driver.step(lanes).items():
            tokens[i].append(token.token_id)
    assert_clear_tokens(prompts, tokens)


def test_logits(shard: Shard, golden: dict[str, Any]) -> None:
    for prompt in golden["prompts"]:
        exact = prompt["exact"]["last_logits"]
        last = prompt_logits(shard, prompt["ids"], [prompt["n"] - 1, 1])[-1]
        assert (last[torch.tensor(exact["ids"])] - torch.tensor(exact["logits"])).abs().max() < 0.05, prompt["name"]


def test_likelihood_of_a_text(shard: Shard, golden: dict[str, Any]) -> None:
    ids = golden["text"]["ids"]
    logits = prompt_logits(shard, ids, [362] * 5)
    nll = torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:]))
    assert abs(float(nll) / 3.09492 - 1) < 1e-4
