"""The GPU's shard where Triton interprets: its tokens are the CPU shard's, greedy and seeded, however prompts are cut."""

import tempfile
from pathlib import Path

import torch

from espalier.replicas.config import EngineConfig
from espalier.replicas.request import SamplingParams
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
