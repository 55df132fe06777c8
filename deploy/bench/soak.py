"""A soak: random requests for a given time, many at once, some of whose clients leave. Every reply is held against the same request's solo run.

At the end nothing may be left of them: no request, no block of KV, no device memory. Knows targets by their protocol only.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace

from espalier.deploy.bench.prompts import BenchPrompt, random_token_ids
from espalier.deploy.bench.stats import Comparison, StreamRecord, compare, together
from espalier.deploy.bench.target import BenchError, Call, Target, TargetState, run_alone, state_at_rest
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.request import SamplingParams

# An allocator may round up what it takes; a leak over thousands of requests is more than this.
DEVICE_SLACK_BYTES = 32 * 2**20
_MAX_PROMPT, _MAX_REPLY = 1024, 128
_BEGINNINGS = 4
_DRAIN_SHARE = 0.01
_PROGRESS_S = 30.0
_WAIT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakPlan:
    """seconds: how long requests are sent. abort_share: of requests, those whose client leaves. streams: most of them at once.

    distinct: different requests; they run alone first, which takes time of its own. seed: of everything random.
    """

    seconds: float
    abort_share: float
    streams: int
    distinct: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakResult:
    """requests: sent while soaking. aborted: of them, those whose client left before the end. start, end: the target at rest, before and after."""

    requests: int
    aborted: int
    comparison: Comparison
    start: TargetState
    end: TargetState

    @property
    def leaks(self) -> tuple[str, ...]:
        """One sentence for each thing that is still there."""
        found = []
        if self.end.num_live:
            found.append(f"{self.end.num_live} requests are live still")
        if self.end.held_share:
            found.append(f"{self.end.held_share:.2%} of the KV blocks are held still")
        before, after = self.start.device_bytes, self.end.device_bytes
        if before is not None and after is not None and after - before > DEVICE_SLACK_BYTES:
            found.append(f"device memory grew from {before} to {after} bytes")
        return tuple(found)

    @property
    def is_clean(self) -> bool:
        """Nothing unequal, nothing failed, nothing leaked."""
        return self.comparison.is_clean and not self.leaks


def run_soak(plan: SoakPlan, target: Target, progress: Callable[[str], None]) -> SoakResult:
    """Runs the soak. Raises BenchError when a request fails even alone, InvalidRequestError when the target tells no hashes."""
    if not target.info.is_exact:
        raise InvalidRequestError(f"--soak: {target.info.where} tells no hash of its replies", param="soak")
    rng = random.Random(f"soak {plan.seed}")
    calls = random_calls(plan.distinct, target, rng)
    progress(f"{len(calls)} requests alone")
    solo = run_alone(target, calls)
    for record in solo:
        if record.error is not None:
            raise BenchError(f"request {record.prompt} fails when run alone: {record.error}")
    expected = {record.prompt: record for record in solo}
    start = state_at_rest(target)
    seen = _Seen(expected)
    _soak(plan, target, calls, rng, seen, progress)
    return SoakResult(
        requests=seen.requests,
        aborted=seen.aborted,
        comparison=seen.comparison,
        start=start,
        end=state_at_rest(target),
    )


@dataclass(slots=True)
class _Seen:
    """What has ended so far. Records are compared and dropped, so that a long soak's own memory does not grow with it."""

    expected: Mapping[str, StreamRecord]
    requests: int = 0
    aborted: int = 0
    comparison: Comparison = field(default_factory=Comparison)

    def take(self, records: Sequence[StreamRecord]) -> None:
        self.requests += len(records)
        self.aborted += sum(record.left for record in records)
        self.comparison = together([self.comparison, compare(records, self.expected, "soak")])


def _soak(
    plan: SoakPlan,
    target: Target,
    calls: Sequence[Call],
    rng: random.Random,
    seen: _Seen,
    progress: Callable[[str], None],
) -> None:
    """Bursts of random size, and now and then a pause until all have ended. Raises BenchError when nothing ends any more."""
    flying: set[Future[StreamRecord]] = set()
    began = told = time.monotonic()
    while (now := time.monotonic()) < began + plan.seconds or flying:
        is_over = now >= began + plan.seconds
        if not is_over:
            missing = rng.randint(1, plan.streams) - len(flying)
            flying.update(
                target.submit([maybe_leaving(rng.choice(calls), plan.abort_share, rng) for _ in range(missing)])
            )
        drains = is_over or rng.random() < _DRAIN_SHARE
        ended, flying = wait(flying, _WAIT_S, ALL_COMPLETED if drains else FIRST_COMPLETED)
        if not ended:
            raise BenchError(f"{len(flying)} requests have not ended within {_WAIT_S:g} s")
        seen.take([future.result() for future in ended])
        if now - told > _PROGRESS_S:
            told = now
            found = seen.comparison
            progress(f"{seen.requests} requests in {now - began:.0f} s: {found.unequal} unequal, {found.failed} failed")


def maybe_leaving(call: Call, share: float, rng: random.Random) -> Call:
    """The call, with a client that leaves before its last token in so many cases."""
    return replace(call, leave_after=rng.randrange(call.params.max_tokens)) if rng.random() < share else call


def random_calls(count: int, target: Target, rng: random.Random) -> list[Call]:
    """Different requests: prompts of every length, some with a common beginning; greedy and seeded; penalties, biases, log-probabilities, stops."""
    info = target.info
    assert info.vocab_size is not None, "an exact target tells its vocabulary"
    room = _MAX_PROMPT + _MAX_REPLY if info.max_context is None else info.max_context
    longest = min(_MAX_PROMPT, room // 2)
    beginnings = [random_token_ids(longest // 2, info.vocab_size, rng) for _ in range(_BEGINNINGS)]
    calls = []
    for number in range(count):
        length = min(longest, int(2 ** rng.uniform(0, 10.5)))
        token_ids = random_token_ids(length, info.vocab_size, rng)
        if rng.random() < 0.4:
            token_ids = (rng.choice(beginnings)[: rng.randint(1, longest // 2)] + token_ids)[:longest]
        calls.append(
            Call(
                prompt=BenchPrompt(f"soak-{number}", "soak", token_ids=token_ids),
                params=random_params(rng, info.vocab_size, min(_MAX_REPLY, room - len(token_ids))),
                use_prefix_cache=not (info.can_skip_cache and rng.random() < 0.1),
            )
        )
    return calls


def random_params(rng: random.Random, vocab_size: int, most_tokens: int) -> SamplingParams:
    """Any way of sampling that requests may ask for."""
    is_greedy = rng.random() < 0.4
    max_tokens = rng.randint(1, most_tokens)
    penalised = rng.random() < 0.3
    return SamplingParams(
        temperature=0.0 if is_greedy else rng.choice((0.3, 0.8, 1.0, 1.5)),
        top_k=0 if is_greedy else rng.choice((0, 0, 1, 20, 200)),
        top_p=1.0 if is_greedy else rng.choice((1.0, 0.95, 0.5)),
        min_p=0.0 if is_greedy else rng.choice((0.0, 0.0, 0.05)),
        repetition_penalty=rng.choice((1.0, 1.1, 1.3)) if penalised else 1.0,
        presence_penalty=rng.choice((0.0, 0.5, -0.5)) if penalised else 0.0,
        frequency_penalty=rng.choice((0.0, 0.3)) if penalised else 0.0,
        logit_bias=tuple((token_id, 5.0) for token_id in sorted(rng.sample(range(vocab_size), 3)))
        if rng.random() < 0.1
        else (),
        seed=rng.getrandbits(53),
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens),
        stop_token_ids=tuple(rng.randrange(vocab_size) for _ in range(20)) if rng.random() < 0.2 else (),
        ignore_eos=rng.random() < 0.7,
        logprobs=rng.choice((0, 1, 5)) if rng.random() < 0.2 else None,
    )
