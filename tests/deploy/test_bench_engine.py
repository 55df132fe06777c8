"""The bench on engines in this process: exact shards come out equal, and those that break exactness or leak are found out."""

import abc
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from espalier.deploy.bench.arrival import judge
from espalier.deploy.bench.engine_target import EngineTarget
from espalier.deploy.bench.fresh import kept_lengths
from espalier.deploy.bench.load import run_bench
from espalier.deploy.bench.plan import BenchPlan, sampling_params
from espalier.deploy.bench.prompts import BenchPrompt, random_prompts
from espalier.deploy.bench.report import soak_table, tables
from espalier.deploy.bench.results import BenchResult
from espalier.deploy.bench.soak import (
    DEVICE_SLACK_BYTES,
    SoakPlan,
    SoakResult,
    maybe_leaving,
    random_calls,
    random_params,
    run_soak,
)
from espalier.deploy.bench.stats import Comparison, StreamRecord
from espalier.deploy.bench.target import (
    BenchError,
    Call,
    TargetInfo,
    TargetState,
    run_alone,
    run_together,
    state_at_rest,
)
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.group import LocalShardGroup
from espalier.replicas.request import Request, SamplingParams
from espalier.replicas.schedule.step import Lane, SampledToken, Step, StepResult
from espalier.replicas.token_hash import token_sha256
from tests.support.fake_shard import FakeShard, fake_config, fake_info, solo_tokens

INFO = fake_info(num_blocks=272, max_context=2048)


class WrongShard(FakeShard, abc.ABC):
    """Draws another token where `is_wrong` says so of a step and a lane of it."""

    @abc.abstractmethod
    def is_wrong(self, step: Step, lane: Lane) -> bool: ...

    def execute(self, step: Step) -> StepResult:
        result = super().execute(step)
        lanes = {lane.seq_id: lane for lane in step.lanes}
        sampled = {
            seq_id: tuple(SampledToken((token.token_id + 1) % self.info.vocab_size, None) for token in tokens)
            if self.is_wrong(step, lanes[seq_id])
            else tokens
            for seq_id, tokens in result.sampled.items()
        }
        return StepResult(result.step_id, sampled, result.failed)


class NeighbourShard(WrongShard):
    """A row's bits depend on how many are with it."""

    def is_wrong(self, step: Step, lane: Lane) -> bool:
        return len(step.lanes) >= 3


class TailShard(WrongShard):
    """The attention of a tail of 17 rows past kept state reads one of them wrongly."""

    def is_wrong(self, step: Step, lane: Lane) -> bool:
        return lane.start > 0 and len(lane.tokens) == 17


@contextmanager
def target_of(shard: FakeShard, **config: Any) -> Iterator[EngineTarget]:
    target = EngineTarget(fake_config(**config), LocalShardGroup(shard), None)
    try:
        yield target
    finally:
        target.close()
    assert shard.violations == []


def plan(**changes: Any) -> BenchPlan:
    prompts = random_prompts(5, [40, 7], INFO.vocab_size, random.Random(0))
    fields: dict[str, Any] = {"prompts": prompts, "samplings": ("greedy", "seeded"), "levels": (1, 5)}
    return BenchPlan(**(fields | {"num_tokens": 24, "reps": 1} | changes))


def bench(shard: FakeShard, **changes: Any) -> BenchResult:
    # Rounds that hold all tails whole.
    with target_of(shard, batch_tokens=256) as target:
        return run_bench(plan(**changes), [target], lambda line: None)


def call(token_ids: Sequence[int] = (5, 6, 7), **changes: Any) -> Call:
    params = SamplingParams(max_tokens=changes.pop("max_tokens", 4), temperature=0.0, ignore_eos=True)
    return Call(prompt=BenchPrompt("p", "test", token_ids=tuple(token_ids)), params=params, **changes)


def test_an_exact_engine_is_equal_in_every_cell() -> None:
    result = bench(FakeShard(INFO), serial=True)
    assert result.is_clean
    compared = {(row.sampling, row.streams): row.comparison.equal for row in result.rows if row.streams != "alone"}
    assert compared == {
        (sampling, streams): count
        for sampling in ("greedy", "seeded")
        for streams, count in (("serial", 5), ("1", 1), ("5", 5))
    }
    assert (result.targets[0].is_exact, result.targets[0].vocab_size) == (True, INFO.vocab_size)
    assert "engine loop" in tables(result)


def test_its_solo_hashes_are_those_of_the_model() -> None:
    result = bench(FakeShard(INFO), levels=(1,))
    prompts = {prompt.name: prompt for prompt in plan().prompts}
    for solo in result.solo:
        index = list(prompts).index(solo.record.prompt)
        params = sampling_params(solo.sampling, 24, index)
        request = Request(request_id="r", prompt_token_ids=prompts[solo.record.prompt].token_ids, params=params)
        assert solo.record.token_sha256 == token_sha256(solo_tokens(request, INFO))


def test_rows_that_depend_on_their_neighbours_are_unequal_at_many_streams_only() -> None:
    result = bench(NeighbourShard(INFO), samplings=("greedy",))
    found = {row.streams: row.comparison for row in result.rows}
    assert (found["1"].equal, found["1"].unequal) == (1, 0)
    assert found["5"].unequal >= 3
    assert "token" in result.notes[0]
    assert not result.is_clean


def test_a_round_that_fails_is_counted_as_failed() -> None:
    def fault(step: Step, lane: Lane) -> str | None:
        return "device lost" if len(step.lanes) == 5 else None

    result = bench(FakeShard(INFO, fault=fault), samplings=("greedy",), levels=(5,))
    assert result.rows[-1].comparison.failed >= 1
    assert "device lost" in result.notes[0]


def test_resumed_replies_equal_cold_ones() -> None:
    result = bench(FakeShard(INFO), levels=(1,), fresh=True)
    assert result.is_clean
    cases = {fresh.name: fresh for fresh in result.fresh if fresh.sampling == "greedy"}
    tails = {fresh.prompt_tokens - fresh.kept_tokens for name, fresh in cases.items() if name.startswith("tail")}
    assert tails == {1, 16, 17}
    # A reply's own state is kept too: 64 tokens of prompt and 16 of its 24.
    assert cases["turn-past-88"].kept_tokens == 80
    assert cases["cold-1088-in-company"].kept_tokens == 0
    assert all(fresh.comparison.equal == 1 for fresh in result.fresh)


def test_a_tail_that_is_computed_wrongly_is_found_among_the_others() -> None:
    result = bench(TailShard(INFO), levels=(1,), fresh=True)
    wrong = {fresh.name for fresh in result.fresh if fresh.comparison.unequal}
    assert {"tail-17-past-64", "tail-17-past-1088"} <= wrong
    assert not any(name.startswith(("tail-1-", "tail-16-", "cold")) for name in wrong)
    assert "unequal" in tables(result)


def test_what_did_not_resume_is_no_proof() -> None:
    with target_of(FakeShard(INFO), prefix_cache=False) as target:
        result = run_bench(plan(levels=(1,), samplings=("greedy",), fresh=True), [target], lambda line: None)
    failed = [fresh for fresh in result.fresh if fresh.comparison.failed]
    assert len(failed) == len(result.fresh) - 1
    assert "0 tokens were restored, 64 were kept" in result.notes[0]


def test_kept_states_are_whole_blocks_that_leave_room() -> None:
    assert kept_lengths(None, None, 16, 64) == (64, 8192)
    assert kept_lengths(8192, None, 16, 64) == (64, 8032)
    assert kept_lengths(8192, 4096, 16, 64) == (64, 1024)
    assert kept_lengths(300, None, 64, 8) == (256,)
    with pytest.raises(InvalidRequestError, match=r"--fresh: 64 tokens of kept state .* context of 100 "):
        kept_lengths(100, None, 16, 16)


def test_long_prompts_are_timed_cold_every_time() -> None:
    result = bench(FakeShard(INFO), levels=(1,), samplings=("greedy",), prefill=(100, 700))
    assert [(prefill.prompt_tokens, prefill.runs) for prefill in result.prefill] == [(100, 3), (700, 3)]
    assert all(prefill.tokens_per_s and prefill.tokens_per_s > 0 for prefill in result.prefill)
    with pytest.raises(InvalidRequestError, match="--prefill: 2048 tokens do not fit"):
        bench(FakeShard(INFO), prefill=(2048,))


def test_a_prompt_that_arrives_among_streams_changes_no_reply() -> None:
    result = bench(FakeShard(INFO), levels=(4,), num_tokens=200, arrivals=(500,))
    assert result.is_clean, result.notes
    for arrival in result.arrivals:
        assert (arrival.streams, arrival.prompt_tokens, arrival.comparison.equal) == (4, 500, 4)
        assert arrival.busy_most_s is not None and arrival.busy_p99_s is not None
        assert 0 < arrival.busy_p99_s <= arrival.busy_most_s
    assert "arriving prompt" in tables(result)


def test_rounds_that_a_long_prompt_shares_are_found_out() -> None:
    class MixedShard(WrongShard):
        def is_wrong(self, step: Step, lane: Lane) -> bool:
            return len(lane.tokens) == 1 and step.num_rows > 100

    result = bench(MixedShard(INFO), levels=(4,), num_tokens=200, arrivals=(500,), samplings=("greedy",), alone=False)
    assert result.arrivals[0].comparison.unequal > 0
    assert not result.is_clean


def test_a_prompt_that_arrives_too_late_shows_nothing() -> None:
    def record(name: str, sent: float, times: Sequence[float], sha: str = "a") -> StreamRecord:
        arrivals = tuple((time, 1) for time in times)
        return StreamRecord(prompt=name, sent=sent, arrivals=arrivals, ended=times[-1], token_sha256=sha)

    quiet = [record("one", 0, [1, 2, 3, 4, 5]), record("one", 0, [1, 2])]
    busy = [record("one", 0, [1, 2, 3, 6, 7]), record("one", 0, [1, 2])]
    found = judge("A", "greedy", 9, quiet, busy, record("long", 2.5, [5.5]))
    assert (found.quiet_p99_s, found.busy_most_s, found.ttft_s) == (1, 3, 3)
    assert (found.comparison.equal, found.comparison.failed) == (1, 0)
    late = judge("A", "greedy", 9, quiet, busy, record("long", 2.5, [8.0]))
    assert late.comparison.failed == 1
    assert "give them more --tokens" in late.comparison.notes[0]


def test_a_client_that_leaves_has_what_came_before() -> None:
    with target_of(FakeShard(INFO)) as target:
        [whole] = run_alone(target, [call(max_tokens=1500)])
        gone, early = run_together(target, [call(max_tokens=1500, leave_after=5), call(max_tokens=1500, leave_after=0)])
        assert state_at_rest(target).is_idle
    assert gone.left and early.left
    assert 5 <= gone.num_tokens < 1500
    assert gone.token_ids == whole.token_ids[: gone.num_tokens]
    assert gone.token_sha256 is None


def test_a_request_that_the_engine_refuses_fails_and_the_rest_go_on() -> None:
    with target_of(FakeShard(INFO)) as target:
        refused, served, unread = run_together(
            target,
            [
                call([INFO.vocab_size]),
                call(),
                replace(call(), prompt=BenchPrompt("text", "test", ({"role": "user", "content": "hi"},))),
            ],
        )
    assert refused.error is not None and "outside the vocabulary" in refused.error
    assert unread.error is not None and "without its tokenizer" in unread.error
    assert served.error is None and served.num_tokens == 4


def soak(shard: FakeShard, **changes: Any) -> SoakResult:
    fields: dict[str, Any] = {"seconds": 0.5, "abort_share": 0.3, "streams": 12, "distinct": 12, "seed": 3}
    with target_of(shard, max_lanes=6) as target:
        return run_soak(SoakPlan(**(fields | changes)), target, lambda line: None)


def test_a_soak_of_an_exact_engine_is_clean() -> None:
    result = soak(FakeShard(INFO))
    assert result.is_clean, (result.comparison.notes, result.leaks)
    assert result.requests >= 12
    assert result.comparison.equal == result.requests
    assert "nothing" in soak_table(result)


def test_a_soak_finds_rows_that_depend_on_their_neighbours() -> None:
    result = soak(NeighbourShard(INFO), abort_share=0.0)
    assert result.comparison.unequal > 0
    assert not result.is_clean


def test_a_request_that_fails_alone_ends_the_soak() -> None:
    with pytest.raises(BenchError, match=r"soak-0 fails when run alone: .*broken"):
        soak(FakeShard(INFO, fault=lambda step, lane: "broken"))


@pytest.mark.parametrize(
    ("end", "leak"),
    [
        ({}, None),
        ({"device_bytes": 10 + DEVICE_SLACK_BYTES}, None),
        ({"device_bytes": 11 + DEVICE_SLACK_BYTES}, "device memory grew"),
        ({"num_live": 1}, "1 requests are live"),
        ({"held_share": 0.125}, "12.50% of the KV blocks"),
    ],
)
def test_what_is_left_at_the_end_is_a_leak(end: dict[str, Any], leak: str | None) -> None:
    start = TargetState(num_live=0, held_share=0.0, device_bytes=10)
    result = SoakResult(requests=1, aborted=0, comparison=Comparison(equal=1), start=start, end=replace(start, **end))
    assert result.is_clean is (leak is None)
    assert leak is None or leak in soak_table(result)


class Told:
    """A target that tells these numbers of live requests, one at a time, and the last one from then on."""

    def __init__(self, *live: int, lag_s: float = 0.0) -> None:
        self.info = TargetInfo(where="nowhere", model="told", lag_s=lag_s)
        self.left = list(live)

    def submit(self, calls: Sequence[Call]) -> list[Future[StreamRecord]]:
        raise AssertionError

    def token_ids(self, prompt: BenchPrompt) -> tuple[int, ...]:
        raise AssertionError

    def state(self) -> TargetState:
        return TargetState(num_live=self.left.pop(0) if len(self.left) > 1 else self.left[0])

    def close(self) -> None:
        raise AssertionError


def test_rest_is_waited_for_with_a_bound() -> None:
    told = Told(2, 1, 0)
    assert state_at_rest(told).is_idle
    assert told.left == [0]
    assert state_at_rest(Told(1), timeout_s=0.1).num_live == 1


def test_old_figures_must_stay_idle_for_as_long_as_they_may_be_old() -> None:
    told = Told(0, 0, 5, 0, lag_s=0.3)
    assert state_at_rest(told).is_idle
    assert told.left == [0]


def test_random_requests_are_servable_and_of_every_kind() -> None:
    with target_of(FakeShard(INFO)) as target:
        calls = random_calls(400, target, random.Random(1))
    params = [one.params for one in calls]
    assert all(len(one.prompt.token_ids) + one.params.max_tokens <= INFO.max_context for one in calls)
    assert min(len(one.prompt.token_ids) for one in calls) == 1
    assert {one.temperature > 0 for one in params} == {one.logprobs is None for one in params} == {True, False}
    assert {one.needs_history for one in params} == {bool(one.logit_bias) for one in params} == {True, False}
    assert {one.use_prefix_cache for one in calls} == {True, False}
    assert random_params(random.Random(2), 50, 8) == random_params(random.Random(2), 50, 8)
    leaving = [maybe_leaving(one, 0.2, random.Random(number)).leave_after for number, one in enumerate(calls)]
    assert 40 < sum(after is not None for after in leaving) < 120
