"""Rows sampled on a device and by the reference, side by side: random rows with every kind of parameter, and their golden cases."""

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from espalier.kernels.counters import Scratch
from espalier.kernels.sampling.rows import ALWAYS, MAX_TOP, Limits, Needs, Row, pack_rows
from espalier.kernels.sampling.sample import Drawn, sample, scratch_size
from espalier.replicas.errors import RequestFailedError
from espalier.replicas.request import SamplingParams
from espalier.replicas.sampling.sampler import SampleRow, TokenHistory, sample_row
from tests.data.sampling.make_table import history_of, logits_of

MAX_LISTED = 8


@dataclass(frozen=True)
class Case:
    """One row: its logits [vocab], parameters, position and what it has seen (as the device keeps it)."""

    logits: Tensor
    row: Row
    position: int
    seen: Tensor

    @property
    def vocab(self) -> int:
        return self.logits.shape[0]


@dataclass(frozen=True)
class Result:
    """What a row gave: plain numbers, logarithms as they are in fp32. failed: no finite maximum."""

    token_id: int
    failed: bool = False
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def limits_of(vocab: int) -> Limits:
    return Limits(vocab, MAX_LISTED, MAX_LISTED)


def random_case(vocab: int, seed: int, device: str) -> Case:
    """Any parameters, alone or together; logits with many ties, few, or none, peaked or flat, some banned by -inf; one in 40 with a NaN."""
    choice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab, generator=generator) * choice.choice([0.1, 1.0, 3.0, 8.0])
    steps = choice.choice([None, None, 0.0625, 0.5, 4.0])
    if steps is not None:
        logits = (logits / steps).round() * steps
    if choice.random() < 0.2:
        logits[torch.rand(vocab, generator=generator) < choice.choice([0.01, 0.5, 0.99])] = -math.inf
    if choice.random() < 0.2:
        logits[choice.randrange(vocab)] += 12.0
    if choice.random() < 0.025:
        logits[choice.randrange(vocab)] = choice.choice([math.nan, math.inf])
    ids = [choice.randrange(vocab) for _ in range(MAX_LISTED)]
    row = Row(
        temperature=choice.choice([0.0, 1e-30, 0.1, 0.7, 1.0, 1.0, 1.0, 2.0, 100.0]),
        top_k=choice.choice([0, 0, 0, 1, 2, 20, 50, 255, 256, 257, 1000, 50_000, 2**31 - 1]),
        top_p=choice.choice([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0 - 2**-40]),
        min_p=choice.choice([0.0, 0.0, 1e-13, 0.02, 0.3, 1.0]),
        num_top=choice.choice([None, None, 0, 1, 5, MAX_TOP]),
        seed=choice.getrandbits(64),
        biases=tuple((i, choice.uniform(-20, 20)) for i in set(ids)) if choice.random() < 0.3 else (),
        banned=(*ids[:3], vocab + 3) if choice.random() < 0.3 and vocab > 3 else (),
        banned_before=choice.choice([ALWAYS, 0, 400]),
    )
    seen = torch.zeros(vocab, dtype=torch.int32)
    if choice.random() < 0.4:
        row = replace(
            row,
            repetition=choice.choice([1.0, 1.3, 0.7]),
            presence=choice.choice([0.0, 0.4, -1.0]),
            frequency=choice.choice([0.0, 0.3, -0.2]),
        )
        seen = torch.randint(0, 9, (vocab,), generator=generator, dtype=torch.int32)
        seen *= torch.rand(vocab, generator=generator) < 0.3
    return Case(logits.to(device), row, choice.randrange(1000), seen.to(device))


def golden_case(case: dict[str, Any], device: str) -> Case:
    """A case of the golden table."""
    params = case["params"]
    history = history_of(case, device)
    row = Row(
        temperature=params["temperature"],
        top_k=params.get("top_k", 0),
        top_p=params.get("top_p", 1.0),
        min_p=params.get("min_p", 0.0),
        repetition=params.get("repetition_penalty", 1.0),
        presence=params.get("presence_penalty", 0.0),
        frequency=params.get("frequency_penalty", 0.0),
        biases=tuple((token_id, bias) for token_id, bias in params.get("logit_bias", ())),
        banned=tuple(case["banned"]),
        num_top=params.get("logprobs"),
        seed=params["seed"],
    )
    seen = history.output_counts * 2 + history.in_prompt.int()
    return Case(logits_of(case, device), row, case["position"], seen)


def by_reference(case: Case) -> Result:
    """What the sampler in plain torch gives."""
    row = case.row
    params = SamplingParams(
        temperature=row.temperature,
        top_k=row.top_k,
        top_p=row.top_p,
        min_p=row.min_p,
        repetition_penalty=row.repetition,
        presence_penalty=row.presence,
        frequency_penalty=row.frequency,
        logit_bias=row.biases,
        logprobs=row.num_top,
        seed=row.seed,
    )
    history = TokenHistory(case.vocab, case.logits.device)
    history.in_prompt, history.output_counts, history.length = case.seen & 1 == 1, case.seen >> 1, case.position
    banned = row.banned if case.position < row.banned_before else ()
    try:
        sampled = sample_row(case.logits, SampleRow(params, case.position, history, banned))
    except RequestFailedError:
        return Result(0, failed=True)
    if sampled.logprobs is None:
        return Result(sampled.token_id)
    return Result(sampled.token_id, False, sampled.logprobs.logprob, sampled.logprobs.top)


def golden_result(result: Result) -> dict[str, Any]:
    """A result as the golden table writes it."""
    if result.logprob is None:
        return {"token_id": result.token_id}
    top = [[token_id, _bits(logprob)] for token_id, logprob in result.top]
    return {"token_id": result.token_id, "logprob": _bits(result.logprob), "top": top}


def _bits(x: float) -> str:
    return f"{int(torch.tensor(x, dtype=torch.float32).view(torch.int32)) & 0xFFFFFFFF:08x}"


class Round:
    """Device buffers for some rows of one vocabulary: `run` launches, `results` reads. Outputs and scratch are poisoned before."""

    def __init__(self, cases: list[Case], needs: Needs | None = None, dtype: torch.dtype = torch.float32) -> None:
        device = cases[0].logits.device
        rows = len(cases)
        self.limits = limits_of(cases[0].vocab)
        self.needs = Needs.of([case.row for case in cases], self.limits) if needs is None else needs
        self.num_top = [case.row.num_top for case in cases]
        self.logits = torch.stack([case.logits for case in cases]).to(dtype)
        self.lanes = torch.arange(rows, dtype=torch.int32, device=device)
        self.positions = torch.tensor([case.position for case in cases], device=device)
        self.table = pack_rows([case.row for case in cases], self.limits).to(device)
        self.seen = torch.stack([case.seen for case in cases])
        size = scratch_size(rows, self.limits)
        self.scratch = Scratch(
            torch.zeros(size.counters, dtype=torch.int32, device=device),
            torch.full((size.partials,), math.nan, device=device),
        )
        self.out = Drawn.empty(rows, device)
        self.pending: Tensor | None = None
        self.poison()

    def poison(self) -> None:
        self.scratch.partials.fill_(math.nan)
        for ids in (self.out.token_ids, self.out.status, self.out.top_ids):
            ids.fill_(-77)
        for logarithms in (self.out.logprob, self.out.top_logprobs):
            logarithms.fill_(math.nan)

    def run(self) -> None:
        sample(
            self.logits,
            self.lanes,
            self.positions,
            self.table,
            self.seen,
            self.limits,
            self.out,
            self.scratch,
            self.needs,
            self.pending,
        )

    def results(self) -> list[Result]:
        assert not self.scratch.counters.any(), "counters are not zero again"
        found = []
        out = [x.tolist() for x in (self.out.token_ids, self.out.status, self.out.logprob)]
        tops = [x.tolist() for x in (self.out.top_ids, self.out.top_logprobs)]
        for token_id, status, logprob, ids, logarithms, num_top in zip(*out, *tops, self.num_top, strict=True):
            assert status in (0, 1)
            if status == 1:
                found.append(Result(token_id, failed=True))
            elif num_top is None:
                found.append(Result(token_id))
            else:
                pairs = list(zip(ids, logarithms, strict=True))
                assert all(pair == (-1, -math.inf) for pair in pairs[num_top:])
                found.append(Result(token_id, False, logprob, tuple(p for p in pairs if p[1] > -math.inf)))
        return found


def on_device(cases: list[Case], needs: Needs | None = None) -> list[Result]:
    """What one call gives for these rows."""
    round_ = Round(cases, needs)
    round_.run()
    return round_.results()
