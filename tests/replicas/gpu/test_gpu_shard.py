"""The GPU's shard where Triton interprets: its tokens are the CPU shard's, greedy and seeded, however prompts are cut."""

import tempfile
from pathlib import Path

import pytest
import torch

from espalier.replicas.cache.tier import BlockCopy
from espalier.replicas.config import EngineConfig
from espalier.replicas.request import SamplingParams
from espalier.replicas.schedule.step import BlockAppend, Lane, SequenceBegin
from tests.support.interpret import interpreted

PROMPT = list(range(40, 60))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SEEDED = SamplingParams(seed=3, max_tokens=8, ignore_eos=True, logprobs=3, repetition_penalty=1.3)


@interpreted
def test_tokens_are_those_of_the_cpu() -> None:
    from espalier.replicas.gpu.shard import GpuShard
    from espalier.replicas.shard import Shard
    from tests.support.model_runs import StepDriver
    from tests.support.tiny import make_tiny_checkpoint

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_tiny_checkpoint(folder / "model", layers=1)
        cpu = StepDriver(Shard(EngineConfig(model_path=model, cache_dir=folder, kv_tokens=1024, max_context=256)))
        config = EngineConfig(
            model_path=model,
            device="cuda",
            cache_dir=folder,
            kv_tokens=1024,
            max_context=256,
            max_lanes=2,
            batch_tokens=32,
            cuda_graphs=False,
        )
        gpu = StepDriver(GpuShard(config, torch.device("cpu")))  # type: ignore[arg-type]
        assert gpu.generate(PROMPT, GREEDY, 4, chunk=32, seq_id=1) == cpu.generate(PROMPT, GREEDY, 4, seq_id=1)
        gpu.step([], ends=(1,))
        assert gpu.generate(PROMPT, SEEDED, 3, chunk=13, seq_id=2) == cpu.generate(PROMPT, SEEDED, 3, seq_id=2)


@interpreted
def test_a_block_that_came_back_from_the_host_is_the_block_that_was_computed() -> None:
    from espalier.replicas.gpu.shard import GpuShard
    from tests.support.model_runs import StepDriver
    from tests.support.tiny import make_tiny_checkpoint

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = EngineConfig(
            model_path=make_tiny_checkpoint(folder / "model", layers=1, quantized=False),
            device="cuda",
            cache_dir=folder,
            kv_tokens=256,
            max_lanes=2,
            batch_tokens=32,
            host_kv_gb=0.001,
            cuda_graphs=False,
        )
        shard = GpuShard(config, torch.device("cpu"))
        assert shard.info.num_host_slots == int(0.001 * 2**30) // (16 * 2 * 2 * 64 * 2)
        driver = StepDriver(shard)  # type: ignore[arg-type]
        tokens = driver.generate(PROMPT, GREEDY, 1, seq_id=1)
        kv = shard._model.kv.storage
        computed = kv[:, :, 0].clone()
        assert computed.any()
        driver.step([], copies=(BlockCopy(0, 3, restores=False),))
        kv[:, :, 0].fill_(torch.nan)
        # The first 16 tokens are restored into block 5, the others run.
        resumed = driver.step(
            [Lane(2, 16, tuple(PROMPT[16:]), 1)],
            begins=(SequenceBegin(2, GREEDY, len(PROMPT)),),
            appends=(BlockAppend(2, (5, 6)),),
            copies=(BlockCopy(5, 3, restores=True),),
        )
        assert torch.equal(kv[:, :, 5].view(torch.int16), computed.view(torch.int16))
        assert resumed[2][0].token_id == tokens[0]
        # A shard that failed to make a copy runs nothing more.
        with pytest.raises(IndexError):
            driver.step([], copies=(BlockCopy(99, 0, restores=False),))
        with pytest.raises(RuntimeError, match="an earlier copy of blocks failed"):
            driver.step([])
