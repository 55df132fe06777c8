"""Runs of a loaded shard below the engine: logits of a prompt cut in any way, and greedy tokens through Steps."""

from collections.abc import Sequence

import torch
from torch import Tensor

from espalier.replicas.batch import LaneRows, make_batch
from espalier.replicas.cache.tier import BlockCopy
from espalier.replicas.request import SamplingParams
from espalier.replicas.schedule.step import BlockAppend, Lane, SampledToken, SequenceBegin, Step
from espalier.replicas.shard import Shard


@torch.inference_mode()
def forward(shard: Shard, lanes: Sequence[LaneRows]) -> Tensor:
    """Logits of the sampled rows of one round, without the sampler."""
    batch = make_batch(
        lanes,
        block_size=shard.info.block_size,
        num_kv_heads=shard._decoder.config.num_kv_heads,
        zero_block=shard._cache.zero_block,
    )
    return shard._decoder.forward(batch, shard._cache)


def prompt_logits(shard: Shard, token_ids: Sequence[int], cuts: Sequence[int], first_block: int = 0) -> Tensor:
    """fp32 [tokens, vocab]: the logits of every position of one sequence, computed in pieces of these lengths."""
    assert sum(cuts) == len(token_ids)
    blocks = range(first_block, first_block + -(-len(token_ids) // shard.info.block_size))
    parts, start = [], 0
    for size in cuts:
        parts.append(forward(shard, [LaneRows(0, start, tuple(token_ids[start : start + size]), size, blocks)]))
        start += size
    return torch.cat(parts)


class StepDriver:
    """Hands steps to a shard in order, as an engine would, with blocks given out in a row."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._step_id = 0
        self._next_block = 0

    def begin(self, seq_id: int, params: SamplingParams, prompt_len: int, max_tokens: int) -> None:
        """A sequence with blocks for `max_tokens` positions."""
        blocks = tuple(range(self._next_block, self._next_block + -(-max_tokens // self.shard.info.block_size)))
        self._next_block += len(blocks)
        begin = SequenceBegin(seq_id, params, prompt_len)
        self.step([], begins=(begin,), appends=(BlockAppend(seq_id, blocks),))

    def step(
        self,
        lanes: Sequence[Lane],
        *,
        begins: tuple[SequenceBegin, ...] = (),
        appends: tuple[BlockAppend, ...] = (),
        ends: tuple[int, ...] = (),
        copies: tuple[BlockCopy, ...] = (),
    ) -> dict[int, tuple[SampledToken, ...]]:
        """Tokens by sequence; no sequence may fail."""
        self._step_id += 1
        result = self.shard.execute(
            Step(self._step_id, "test", tuple(lanes), copies, begins=begins, appends=appends, ends=ends)
        )
        assert not result.failed, result.failed
        return result.sampled

    def generate(
        self, prompt: Sequence[int], params: SamplingParams, num_tokens: int, chunk: int = 256, seq_id: int = 1
    ) -> list[int]:
        """The first tokens after a prompt, alone on the shard."""
        self.begin(seq_id, params, len(prompt), len(prompt) + num_tokens)
        for start in range(0, len(prompt), chunk):
            rows = tuple(prompt[start : start + chunk])
            last = start + len(rows) == len(prompt)
            sampled = self.step([Lane(seq_id, start, rows, 1 if last else 0)])
        tokens = [sampled[seq_id][0].token_id]
        while len(tokens) < num_tokens:
            lane = Lane(seq_id, len(prompt) + len(tokens) - 1, (tokens[-1],), 1)
            tokens.append(self.step([lane])[seq_id][0].token_id)
        self.step([], ends=(seq_id,))
        return tokens
