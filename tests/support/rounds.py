"""Runs a Scheduler and a fake shard round by round on one thread, so that a test decides when a step is planned and when it comes back."""

import pickle
from collections.abc import Sequence as Seq

from espalier.replicas.cache.prefix import StateKind
from espalier.replicas.config import EngineConfig, resolved
from espalier.replicas.request import Request, SamplingParams
from espalier.replicas.schedule.limits import check_servable
from espalier.replicas.schedule.scheduler import Scheduler
from espalier.replicas.schedule.step import Step
from espalier.replicas.schedule.tracks import Track, make_tracks
from espalier.replicas.sequence import Sequence, Status
from espalier.replicas.stats import EngineStats
from tests.support.fake_shard import FakeShard, PoisoningPool, solo_tokens


def make_request(
    request_id: str,
    prompt: Seq[int],
    *,
    max_tokens: int = 8,
    priority: int = 0,
    emitted: Seq[int] = (),
    deadline: float | None = None,
    params: SamplingParams | None = None,
) -> Request:
    """A greedy request; `params` instead of max_tokens for anything else."""
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=params or SamplingParams(temperature=0.0, max_tokens=max_tokens),
        priority=priority,
        emitted_token_ids=tuple(emitted),
        deadline=deadline,
    )


class Rounds:
    """The engine's part without its thread: plans ahead, lets steps run as late as possible, ends sequences where a reply would.

    The first track with something to plan goes first. Each step crosses a pickle on its way to the shard.
    """

    def __init__(self, config: EngineConfig, shard: FakeShard, *, other_kinds: Seq[StateKind[int]] = ()) -> None:
        self.shard = shard
        self.stats = EngineStats()
        self.scheduler = Scheduler(config, shard.info, self.stats, pool=PoisoningPool(shard), other_kinds=other_kinds)
        self.tracks = make_tracks(resolved(config))
        self.flying: list[tuple[Track, Step]] = []
        self.sequences: dict[str, Sequence] = {}
        self.tokens: dict[str, list[int]] = {}
        self.failures: dict[str, str] = {}
        self.num_in_flight = dict.fromkeys((track.name for track in self.tracks), 0)

    def submit(self, request: Request) -> Sequence:
        check_servable(request, self.shard.info)
        sequence = self.scheduler.submit(request, None)
        self.sequences[request.request_id] = sequence
        self.tokens[request.request_id] = list(request.emitted_token_ids)
        return sequence

    def abort(self, request_id: str) -> None:
        self.scheduler.end(self.sequences[request_id])
        self.scheduler.check()

    def plan(self) -> Step | None:
        """Plans one more step on the first track that has room and something to do."""
        for track in self.tracks:
            if self.num_in_flight[track.name] < track.max_in_flight and (step := self.scheduler.plan(track)):
                assert step.num_rows <= track.max_rows
                self.flying.append((track, step))
                self.num_in_flight[track.name] += 1
                self.scheduler.check()
                return step
        return None

    def commit(self, *, overtaking: bool = False) -> Step | None:
        """Runs a step and commits it: the oldest that was planned or, when overtaking, the oldest of the track where that is youngest."""
        if not self.flying:
            return None
        oldest = {flight[0].name: flight for flight in reversed(self.flying)}
        chosen = max(oldest.values(), key=lambda flight: flight[1].step_id) if overtaking else self.flying[0]
        for _, earlier in self.flying[: self.flying.index(chosen)]:
            self.shard.take_over(earlier)
        self.flying.remove(chosen)
        track, step = chosen
        self.num_in_flight[track.name] -= 1
        try:
            result = self.shard.execute(pickle.loads(pickle.dumps(step)))
        except RuntimeError as error:
            outcomes = self.scheduler.commit_failed(step, str(error))
        else:
            outcomes = self.scheduler.commit(step, result)
        for outcome in outcomes:
            request = outcome.sequence.request
            assert outcome.sequence.status is not Status.ENDED or outcome.failure is not None
            if outcome.failure is not None:
                assert request.request_id not in self.failures, "failed twice"
                self.failures[request.request_id] = outcome.failure
                continue
            tokens = self.tokens[request.request_id]
            tokens += [token.token_id for token in outcome.sampled]
            ends = set() if request.params.ignore_eos else set(self.shard.info.eos_token_ids)
            if len(tokens) == request.params.max_tokens or tokens[-1] in ends:
                self.scheduler.end(outcome.sequence)
        self.scheduler.check()
        return step

    def finish(self, *, max_rounds: int = 10_000, overtaking: bool = False) -> None:
        """Goes on until nothing is live; then everything must be back in the pool."""
        for _ in range(max_rounds):
            while self.plan():
                pass
            if self.commit(overtaking=overtaking) is None:
                break
        assert all(sequence.status is Status.ENDED for sequence in self.sequences.values()), "no progress"
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_blocks
        assert self.scheduler.pool.host.num_claimed == 0
        assert self.shard.violations == []

    def run(self, *requests: Request) -> None:
        """Submits all and finishes."""
        for request in requests:
            self.submit(request)
        self.finish()

    def assert_exact(self, *request_ids: str) -> None:
        """These (all, when none is named) have the tokens of their solo runs."""
        for request_id in request_ids or self.sequences:
            expected = solo_tokens(self.sequences[request_id].request, self.shard.info)
            assert tuple(self.tokens[request_id]) == expected, request_id
