"""What the device remembers of live sequences between rounds, by slot: block tables, sampling lines, tokens seen. Knows no rounds.

Tables, lines and prompt lengths are words of one tensor, so that a round's inputs change any of them as (place, value) pairs.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from espalier.kernels.sampling.history import empty_history
from espalier.kernels.sampling.rows import Limits, Row, Word, pack_rows
from espalier.replicas.gpu.inputs import Words
from espalier.replicas.request import MAX_LOGIT_BIASES, MAX_STOP_TOKEN_IDS, SamplingParams
from espalier.replicas.sampling.stops import end_token_ids


def sampling_limits(vocab_size: int, num_eos: int) -> Limits:
    """What the lines of any request have room for."""
    return Limits(vocab_size, max_biases=MAX_LOGIT_BIASES, max_banned=MAX_STOP_TOKEN_IDS + num_eos)


def state_words(num_slots: int, max_blocks: int, limits: Limits) -> int:
    """int32 words of `SlotState`, the histories included."""
    return num_slots * (max_blocks + 1 + limits.width + limits.vocab)


class SlotState:
    """words: int32, all of what follows but `seen`. tables: [slots, max_blocks]. prompt_lens: [slots]. lines: [slots, limits.width].

    seen: int32 [slots, vocab], see `kernels/sampling/history.py`.
    """

    def __init__(self, num_slots: int, max_blocks: int, limits: Limits, device: torch.device) -> None:
        self.limits = limits
        self._max_blocks = max_blocks
        sizes = (num_slots * max_blocks, num_slots, num_slots * limits.width)
        self._first_prompt_len = sizes[0]
        self._first_line = sizes[0] + sizes[1]
        self.words = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        tables, self.prompt_lens, lines = torch.split(self.words, list(sizes))
        self.tables: Tensor = tables.view(num_slots, max_blocks)
        self.lines: Tensor = lines.view(num_slots, limits.width)
        self.seen = empty_history(num_slots, limits.vocab, device)

    def block_updates(self, slot: int, first: int, block_ids: Sequence[int]) -> Words:
        """(place, value) pairs that write entries first, first + 1, ... of a slot's table: int32 [n, 2]."""
        assert first + len(block_ids) <= self._max_blocks, "a table longer than the longest context"
        start = slot * self._max_blocks + first
        places = np.arange(start, start + len(block_ids), dtype=np.int32)
        return _pairs(places, np.asarray(block_ids, dtype=np.int32))

    def begin_updates(self, slot: int, params: SamplingParams, prompt_len: int, eos_token_ids: Sequence[int]) -> Words:
        """(place, value) pairs that tell a slot's prompt length and how its tokens are drawn."""
        row = sampling_row(params, prompt_len, eos_token_ids)
        line = pack_rows([row], self.limits)[0].numpy()
        ids, biases, bans = Word.HEADER, len(row.biases), len(row.banned)
        values = ids + self.limits.max_biases
        banned = values + self.limits.max_biases
        used = np.concatenate(
            [
                np.arange(first, first + size)
                for first, size in ((0, ids), (ids, biases), (values, biases), (banned, bans))
            ]
        )
        length = _pairs(np.array([self._first_prompt_len + slot]), np.array([prompt_len]))
        return np.concatenate([length, _pairs(self._first_line + slot * self.limits.width + used, line[used])])


def sampling_row(params: SamplingParams, prompt_len: int, eos_token_ids: Sequence[int]) -> Row:
    """How the tokens of a sequence are drawn: everything but its history. Ends are banned while the reply would be too short."""
    is_banning = params.min_tokens > 1
    return Row(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        biases=tuple(dict(params.logit_bias).items()),
        banned=tuple(sorted(end_token_ids(params, eos_token_ids))) if is_banning else (),
        banned_before=prompt_len + params.min_tokens - 1 if is_banning else 0,
        num_top=params.logprobs,
        seed=params.seed,
    )


def is_greedy(params: SamplingParams) -> bool:
    """Whether a greedy round serves it: nothing is drawn by chance, counted or reported."""
    return params.temperature == 0.0 and params.logprobs is None and not params.needs_history


def _pairs(places: Words, values: Words) -> Words:
    return np.stack([places, values], axis=1).astype(np.int32)
