"""Runs a plan on one target, or on two in turn: prompts alone, cells of streams that start together, resumed and cold replies, long prompts.

Decides nothing about figures; stats.py does.
"""

import random
from collections.abc import Callable, Sequence

from espalier.deploy.bench.arrival import time_arrival
from espalier.deploy.bench.fresh import run_fresh
from espalier.deploy.bench.plan import BenchPlan, Sampling, calls_at, sampling_params, without_drafts
from espalier.deploy.bench.prompts import SAFE_VOCAB, BenchPrompt, random_token_ids
from espalier.deploy.bench.results import BenchResult, Fresh, Pair, Prefill, Row, Solo
from espalier.deploy.bench.stats import StreamRecord, compare, percentile, summarise
from espalier.deploy.bench.target import BenchError, Call, Target, run_alone, run_together
from espalier.replicas.errors import InvalidRequestError

SIDES = "AB"
_PREFILL_RUNS = 3


def run_bench(plan: BenchPlan, targets: Sequence[Target], progress: Callable[[str], None]) -> BenchResult:
    """Runs the whole plan. Raises BenchError when a prompt fails even alone, InvalidRequestError for what a target cannot do."""
    _check(plan, targets)
    rows: list[Row] = []
    solo: list[Solo] = []
    pairs: list[Pair] = []
    fresh: list[Fresh] = []
    for sampling in plan.samplings:
        for kind in plan.kinds:
            cell_rows, cell_solo, cell_pairs = _run_kind(plan, targets, kind, sampling, progress)
            rows, solo, pairs = rows + cell_rows, solo + cell_solo, pairs + cell_pairs
        if plan.fresh:
            progress(f"{sampling}: resumed with cold")
            for side, target in zip(SIDES, targets, strict=False):
                fresh += run_fresh(target, side, sampling, plan.num_tokens, plan.seed)
    prefill = []
    for num_tokens in plan.prefill:
        progress(f"cold prompts of {num_tokens} tokens")
        prefill += [_time_prefill(plan, target, side, num_tokens) for side, target in zip(SIDES, targets, strict=False)]
    arrivals = []
    for sampling in plan.samplings:
        streams = calls_at(plan.calls(plan.kinds[0], sampling), max(plan.levels), 0)
        for num_tokens in plan.arrivals:
            progress(f"{sampling}: {num_tokens} tokens arrive at {len(streams)} streams")
            for side, target in zip(SIDES, targets, strict=False):
                arrivals.append(time_arrival(target, side, sampling, streams, num_tokens, plan.seed))
    return BenchResult(
        targets=tuple(target.info for target in targets),
        ends=tuple(target.state() for target in targets),
        rows=tuple(rows),
        solo=tuple(solo),
        pairs=tuple(pairs),
        fresh=tuple(fresh),
        prefill=tuple(prefill),
        arrivals=tuple(arrivals),
    )


def _check(plan: BenchPlan, targets: Sequence[Target]) -> None:
    for info in (target.info for target in targets):
        if (plan.serial or plan.fresh) and not info.is_exact:
            option = "serial" if plan.serial else "fresh"
            raise InvalidRequestError(f"--{option}: {info.where} tells no hash of its replies", param=option)
        for option, lengths in (("prefill", plan.prefill), ("arrival", plan.arrivals)):
            if info.max_context is not None and max(lengths, default=0) >= info.max_context:
                raise InvalidRequestError(
                    f"--{option}: {max(lengths)} tokens do not fit in a context of {info.max_context}", param=option
                )


def _run_kind(
    plan: BenchPlan, targets: Sequence[Target], kind: str, sampling: Sampling, progress: Callable[[str], None]
) -> tuple[list[Row], list[Solo], list[Pair]]:
    """Every cell of one kind and one way of sampling."""
    calls = plan.calls(kind, sampling)
    rows: list[Row] = []
    solo: list[Solo] = []
    pairs: list[Pair] = []
    expected: list[dict[str, StreamRecord]] = [{} for _ in targets]

    def add(index: int, streams: str, batches: Sequence[Sequence[StreamRecord]], cpu_s: float | None = None) -> Row:
        records = [record for batch in batches for record in batch]
        row = Row(
            side=SIDES[index],
            kind=kind,
            sampling=sampling,
            streams=streams,
            speed=summarise(batches, cpu_s),
            comparison=compare(records, expected[index], f"{SIDES[index]}, {kind}, {sampling}, {streams}"),
            is_exact=targets[index].info.is_exact,
        )
        rows.append(row)
        progress(_short(row))
        return row

    if plan.alone:
        progress(f"{sampling}: {len(calls)} {kind} prompts alone")
        for index, target in enumerate(targets):
            records = run_alone(target, calls)
            for record in records:
                if record.error is not None:
                    raise BenchError(f"prompt {record.prompt} fails when run alone: {record.error}")
            solo += [Solo(side=SIDES[index], sampling=sampling, record=record) for record in records]
            add(index, "alone", [[record] for record in records])
            expected[index] = {record.prompt: record for record in records}
    if plan.serial:
        progress(f"{sampling}: the same without drafts")
        for index, target in enumerate(targets):
            records = run_alone(target, without_drafts(calls))
            add(index, "serial", [[record] for record in records])
    for level in plan.levels:
        progress(f"{sampling}: {level} {kind} streams, {plan.reps} times")
        batches, cpu_s = _run_cell(targets, calls, level, plan.reps)
        both = [add(index, str(level), batches[index], cpu_s[index]) for index in range(len(targets))]
        if len(targets) == 2:
            pairs.append(pair(both[0], both[1], batches))
    return rows, solo, pairs


def _short(row: Row) -> str:
    """What a row says, for whoever watches; a run that is cut off has told so much."""
    speed, found = row.speed.decode_tokens_per_s, row.comparison
    told = "" if speed is None else f"{speed:.1f} tok/s decoding, "
    return f"  {row.side}: {told}{found.equal} equal, {found.unequal} unequal, {found.failed} failed"


def _run_cell(
    targets: Sequence[Target], calls: Sequence[Call], level: int, reps: int
) -> tuple[list[list[list[StreamRecord]]], list[float | None]]:
    """The streams of each repetition of each target, and the CPU seconds of each. Targets take turns: A, B, A, B."""
    batches: list[list[list[StreamRecord]]] = [[] for _ in targets]
    before = [target.state().cpu_s for target in targets]
    for rep in range(reps):
        for index, target in enumerate(targets):
            batches[index].append(run_together(target, calls_at(calls, level, rep)))
    after = [target.state().cpu_s for target in targets]
    spent = [None if a is None or b is None else a - b for a, b in zip(after, before, strict=True)]
    return batches, spent


def pair(first: Row, second: Row, batches: Sequence[Sequence[Sequence[StreamRecord]]]) -> Pair:
    """Two rows of one cell side by side. batches: of both targets, made of equal calls."""
    counts = {True: 0, False: 0}
    for one, two in zip(*batches, strict=True):
        for a, b in zip(one, two, strict=True):
            if a.token_sha256 is not None and b.token_sha256 is not None:
                counts[a.token_sha256 == b.token_sha256] += 1

    def ratio(name: str) -> float | None:
        a, b = getattr(first.speed, name), getattr(second.speed, name)
        return b / a if a and b is not None else None

    return Pair(
        kind=first.kind,
        sampling=first.sampling,
        streams=first.streams,
        tokens_per_s=ratio("tokens_per_s"),
        decode_tokens_per_s=ratio("decode_tokens_per_s"),
        ttft=ratio("ttft_p50_s"),
        same=counts[True],
        different=counts[False],
    )


def _time_prefill(plan: BenchPlan, target: Target, side: str, num_tokens: int) -> Prefill:
    """One stream, cold every time: the tokens are new to the target, and it is asked to skip its cache where it can."""
    runs = max(plan.reps, _PREFILL_RUNS)
    rng = random.Random(f"prefill {plan.seed} {num_tokens}")
    calls = [
        Call(
            prompt=BenchPrompt(
                f"prefill-{num_tokens}-{run}",
                "prefill",
                token_ids=random_token_ids(num_tokens, target.info.vocab_size or SAFE_VOCAB, rng),
            ),
            params=sampling_params("greedy", 1, 0),
            use_prefix_cache=not target.info.can_skip_cache,
        )
        for run in range(runs)
    ]
    records = run_alone(target, calls)
    notes = [f"{side}, {record.prompt}: {record.error}" for record in records if record.error is not None]
    notes += [
        f"{side}, {record.prompt}: {record.cached_tokens} tokens were kept"
        for record in records
        if record.cached_tokens
    ]
    speeds = [num_tokens / record.ttft_s for record in records if record.error is None and record.ttft_s]
    return Prefill(
        side=side,
        prompt_tokens=num_tokens,
        runs=runs,
        tokens_per_s=percentile(speeds, 0.5),
        spread=(min(speeds), max(speeds)) if speeds else None,
        notes=tuple(notes),
    )
