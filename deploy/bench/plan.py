"""BenchPlan: what a bench runs, and the calls of each of its cells. Runs nothing.

A cell is a kind of prompts, a way of sampling and a number of streams. Stream i of repetition r takes prompt (r x level + i), so that small levels
see them all; each prompt has a seed of its own, which stays the same wherever the prompt runs.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from espalier.deploy.bench.prompts import BenchPrompt
from espalier.deploy.bench.target import Call
from espalier.replicas.request import SamplingParams

Sampling = Literal["greedy", "seeded"]
SAMPLINGS: tuple[Sampling, ...] = ("greedy", "seeded")
_SEED = 20_011


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """levels: numbers of concurrent streams. num_tokens: tokens of each reply. reps: times that each cell runs.

    alone: every prompt also runs by itself, and replies are compared with that. serial: the same once more, without drafts. fresh: replies that
    resume kept state are compared with cold ones. prefill: prompt lengths that are timed to the first token. arrivals: lengths of prompts that come
    among decoding streams. seed: of random tokens.
    """

    prompts: tuple[BenchPrompt, ...]
    samplings: tuple[Sampling, ...]
    levels: tuple[int, ...]
    num_tokens: int
    reps: int
    alone: bool = True
    serial: bool = False
    fresh: bool = False
    prefill: tuple[int, ...] = ()
    arrivals: tuple[int, ...] = ()
    seed: int = 0

    @property
    def kinds(self) -> tuple[str, ...]:
        """In the order in which they come."""
        return tuple(dict.fromkeys(prompt.kind for prompt in self.prompts))

    @property
    def prompts_id(self) -> str:
        """Hex SHA-256 that is equal where prompts, in their order, and reply lengths are: then solo replies can be held together."""
        content = [[prompt.name, prompt.messages, prompt.token_ids] for prompt in self.prompts]
        return hashlib.sha256(json.dumps([content, self.num_tokens]).encode()).hexdigest()

    def calls(self, kind: str, sampling: Sampling) -> list[Call]:
        """One for each prompt of the kind."""
        return [
            Call(prompt=prompt, params=sampling_params(sampling, self.num_tokens, index))
            for index, prompt in enumerate(self.prompts)
            if prompt.kind == kind
        ]


def sampling_params(sampling: Sampling, num_tokens: int, index: int) -> SamplingParams:
    """Exactly num_tokens tokens, greedy or drawn with a seed that `index` gives."""
    if sampling == "greedy":
        return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return SamplingParams(temperature=0.8, top_p=0.95, seed=_SEED + index, max_tokens=num_tokens, ignore_eos=True)


def calls_at(calls: Sequence[Call], level: int, rep: int) -> list[Call]:
    """The calls of one repetition at so many streams."""
    return [calls[(rep * level + index) % len(calls)] for index in range(level)]


def without_drafts(calls: Sequence[Call]) -> list[Call]:
    """The same calls, with speculative drafts refused."""
    return [replace(call, params=replace(call.params, draft=False)) for call in calls]
