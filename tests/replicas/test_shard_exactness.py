"""Through the whole model: a row alone has the bits of the row in company, in any chunk, at any place, on one thread or two."""

import pytest
import torch

from espalier.replicas.batch import LaneRows
from espalier.replicas.config import EngineConfig
from espalier.replicas.shard import Shard
from tests.support.model_runs import forward, prompt_logits
from tests.support.tiny import make_tiny_checkpoint

LENGTH = 150
# hidden 192 and intermediate 320 are no multiples of 128, so the stored dims are padded.
MODELS = {
    "llama": {"architecture": "llama"},
    "qwen2": {"architecture": "qwen2", "head": "tied"},
    "qwen3": {"architecture": "qwen3", "bits": 2.5},
    "padded": {"architecture": "llama", "hidden": 192, "intermediate": 320, "heads": 3, "kv_heads": 1, "vocab": 600},
    "plain": {"architecture": "llama", "quantized": False},
}


@pytest.fixture(
    scope="module", params=[(name, "fp32") for name in MODELS] + [("llama", "fp16"), ("qwen3", "bf16")], ids="-".join
)
def shard(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shard:
    name, kv_dtype = request.param
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp(name) / "model", **MODELS[name])
    config = EngineConfig(
        model_path=folder, cache_dir=folder.parent / "cache", kv_dtype=kv_dtype, kv_tokens=1024, cpu_threads=1
    )
    return Shard(config)


def prompt(shard: Shard, seed: int, length: int = LENGTH) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, shard.info.vocab_size, (length,), generator=generator).tolist()


@pytest.mark.parametrize(
    "cuts", [[1] * LENGTH, [8] * 18 + [6], [127, 1, 22], [3, 9, 128, 10]], ids=["1", "8", "127", "mixed"]
)
def test_chunks_do_not_matter(shard: Shard, cuts: list[int]) -> None:
    token_ids = prompt(shard, 0)
    whole = prompt_logits(shard, token_ids, [LENGTH])
    assert whole.isfinite().all()
    assert whole.std() > 0.5
    assert torch.equal(prompt_logits(shard, token_ids, cuts, first_block=20), whole)


def test_keys_and_values_made_in_decoding_are_those_of_a_prompt(shard: Shard) -> None:
    """What lets the blocks of a reply serve the next turn's prompt."""
    token_ids = prompt(shard, 5)
    prompt_logits(shard, token_ids, [LENGTH])
    prompt_logits(shard, token_ids, [30] + [1] * (LENGTH - 30), first_block=20)
    num_full = LENGTH // shard.info.block_size
    for stored in (*shard._cache.keys, *shard._cache.values):
        assert stored[:num_full].count_nonzero() > 0
        assert torch.equal(stored[:num_full], stored[20 : 20 + num_full])


def test_company_does_not_matter(shard: Shard) -> None:
    prompts = [prompt(shard, seed, length) for seed, length in ((0, LENGTH), (1, 30), (2, 129), (3, 8))]
    tables = [list(range(start, start + 12)) for start in (30, 0, 50, 15)]
    alone = [prompt_logits(shard, token_ids, [len(token_ids)]) for token_ids in prompts]

    def lane(index: int, start: int, stop: int) -> LaneRows:
        return LaneRows(index, start, tuple(prompts[index][start:stop]), stop - start, tables[index])

    rounds = [
        [(1, 0, 29), (0, 0, 100)],
        [(2, 0, 128), (0, 100, 103), (1, 29, 30)],
        [(3, 0, 7), (2, 128, 129), (0, 103, LENGTH)],
        [(3, 7, 8)],
    ]
    for lanes in rounds:
        logits = forward(shard, [lane(*rows) for rows in lanes])
        expected = torch.cat([alone[index][start:stop] for index, start, stop in lanes])
        assert torch.equal(logits, expected)


def test_threads_do_not_matter(shard: Shard) -> None:
    token_ids = prompt(shard, 4)
    one = prompt_logits(shard, token_ids, [140, 1, 9])
    torch.set_num_threads(2)
    try:
        assert torch.equal(prompt_logits(shard, token_ids, [140, 1, 9]), one)
    finally:
        torch.set_num_threads(1)
