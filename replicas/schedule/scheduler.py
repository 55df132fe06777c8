"""Scheduler: plan(track) -> Step, commit(step, result). Who runs, on which blocks, and what the shards must be told. Knows no text and no clock.

Decoding lanes get their rows first, so no prompt stalls them; prompts share what is left, in order of rank, in chunks, no more of them beside
decoding lanes than `pacing` says. A sequence is admitted
when all tokens it has so far find blocks; from then on only decoding asks for more, and where none is free the last in rank is preempted: it
keeps its tokens, gives up its blocks and waits again. A sequence of the first rank is never preempted, so some sequence always gets on.

A request that wants to be alone is admitted when no other waits, holds a lane or is read by a step in flight, and leaves its lane, as if preempted,
in the first plan after another has come. So no step has rows of it and of another; at most its steps in flight are done before the other's first.
Figures of requests (running, waiting, prompt tokens, preemptions) leave it out.

Where prompts have a track of their own, a sequence moves to the one that decodes when all its tokens are known and computed and no step in
flight reads it; after a preemption it begins with the other again.

Kept blocks that make room for others may live on in a host tier (`cache/tier.py`). A sequence that finds its prefix there gets new blocks for it at
once, and steps say what is copied into them before its first row.

Nothing that a step in flight on any track reads is freed: a sequence that has left its lane keeps blocks and lane until its last step is committed.
"""

import bisect
import itertools
from collections.abc import Sequence as Seq
from typing import NamedTuple

from espalier.replicas.cache.blocks import BlockPool
from espalier.replicas.cache.prefix import KVPrefix, PrefixChain, StateKind, longest_common, root_key
from espalier.replicas.cache.table import BlockTable, blocks_for
from espalier.replicas.cache.tier import HostTier
from espalier.replicas.config import EngineConfig, resolved
from espalier.replicas.request import Request
from espalier.replicas.schedule.builder import StepBuilder
from espalier.replicas.schedule.pacing import fitted_rows, prompt_limit
from espalier.replicas.schedule.queue import WaitingQueue
from espalier.replicas.schedule.step import SampledToken, Step, StepCommit, StepResult
from espalier.replicas.schedule.tracks import Track
from espalier.replicas.sequence import Residence, Sequence, Status
from espalier.replicas.shard_info import ShardInfo
from espalier.replicas.stats import EngineStats


class Outcome(NamedTuple):
    """What a step brought one sequence: tokens, or the message of its failure, which has ended it."""

    sequence: Sequence
    sampled: tuple[SampledToken, ...] = ()
    failure: str | None = None


class Scheduler:
    """All sequences of one replica. Not thread-safe: its owner makes one call at a time.

    pool: the blocks of the shards. other_kinds: state beside KV blocks that must be restorable at the same position.
    """

    def __init__(
        self,
        config: EngineConfig,
        info: ShardInfo,
        stats: EngineStats,
        *,
        pool: BlockPool | None = None,
        other_kinds: Seq[StateKind[int]] = (),
    ) -> None:
        self._config = resolved(config)
        self._info = info
        self._stats = stats
        self.pool = BlockPool(info.num_blocks, HostTier(info.num_host_slots)) if pool is None else pool
        self._kv = KVPrefix(self.pool)
        self._other_kinds = other_kinds
        self._root = root_key(info.weights_id, info.numerics_id, info.block_size)
        self._queue = WaitingQueue(config.max_waiting)
        self._spare = WaitingQueue(config.max_waiting)  # those that want to be alone
        self._running: list[Sequence] = []  # by rank
        self._residents: dict[int, Sequence] = {}  # running ones, and those that steps in flight still read
        self._held: dict[int, list[tuple[StateKind[int], int]]] = {}  # state that a step in flight restores
        self._ends: list[int] = []  # released, and the shards do not know yet
        self._orders = itertools.count()
        self._seq_ids = itertools.count()
        self._next_step_id = 0

    @property
    def num_running(self) -> int:
        """Sequences that hold a lane."""
        return len(self._running) if self._alone is None else 0

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._queue)

    @property
    def _alone(self) -> Sequence | None:
        """The running sequence that wants to be alone; no other runs then."""
        return self._running[0] if self._running and self._running[0].request.alone else None

    def is_full_for(self, request: Request) -> bool:
        """Whether this newcomer has to be turned away."""
        if request.alone:
            return self._spare.is_full(num_free_lanes=1)
        num_resident = sum(not sequence.request.alone for sequence in self._residents.values())
        return self._queue.is_full(self._config.max_lanes - num_resident)

    def resident(self, seq_id: int) -> Sequence:
        """The sequence that a step calls so."""
        return self._residents[seq_id]

    def submit(self, request: Request, deadline: float | None) -> Sequence:
        """Puts a servable request (`limits.check_servable`) into the queue. deadline: in the owner's clock."""
        tokens = itertools.chain(request.prompt_token_ids, request.emitted_token_ids)
        chain = PrefixChain(self._root, self._info.block_size, tokens)
        sequence = Sequence(request, chain, order=next(self._orders), deadline=deadline)
        self._queue_of(sequence).push(sequence)
        return sequence

    def _queue_of(self, sequence: Sequence) -> WaitingQueue:
        return self._spare if sequence.request.alone else self._queue

    def end(self, sequence: Sequence) -> None:
        """The sequence gets no more rows; its blocks are free once the last step that reads them is committed."""
        if sequence.status is Status.WAITING:
            self._queue_of(sequence).remove(sequence)
            sequence.status = Status.ENDED
        elif sequence.status is Status.RUNNING:
            self._leave(sequence, Status.ENDED)
        else:
            sequence.status = Status.ENDED

    def plan(self, track: Track) -> Step | None:
        """The next step of this track; None when there is nothing to do on it."""
        builder = StepBuilder(self._next_step_id, track, self.pool.host, max_lanes=self._config.max_lanes)
        if self._alone is not None and self._queue.head() is not None:
            self._leave(self._alone, Status.PREEMPTED)
        decoding = [sequence for sequence in self._running if sequence.decodes]
        if track.takes_decodes:
            self._add_decoding(builder, track, decoding)
        if track.takes_prompts:
            self._add_prompts(builder, track, decode_waits=bool(decoding))
        step = builder.build(tuple(self._ends))
        if step is not None:
            self._next_step_id += 1
            self._ends.clear()
        return step

    def _add_decoding(self, builder: StepBuilder, track: Track, decoding: Seq[Sequence]) -> None:
        for sequence in decoding:
            # An earlier one of these may have preempted it.
            if sequence.status is Status.RUNNING and _joins(sequence, track) and self._make_room(sequence):
                sequence.residence.track = track.name
                builder.add(sequence)

    def _add_prompts(self, builder: StepBuilder, track: Track, *, decode_waits: bool) -> None:
        """Rows of running prompts and of as many newcomers as the round has room for."""
        prompts = [sequence for sequence in self._running if sequence.residence.track == track.name]
        prompts = [sequence for sequence in prompts if sequence.num_to_plan and not sequence.decodes]
        available = sum(sequence.num_to_plan for sequence in prompts)
        limit = prompt_limit(
            track.max_rows,
            builder.num_rows,
            decode_waits=decode_waits,
            round_ms=self._info.round_ms,
            decode_gap_ms=self._config.decode_gap_ms,
        )
        while available < limit and (admitted := self._admit_next(track)) is not None:
            builder.begin(admitted, self._hold_other_state(admitted))
            prompts.append(admitted)
            available += admitted.num_to_plan
        builder.limit_prompts(fitted_rows(min(available, limit), builder.num_rows, self._info.round_ms))
        for sequence in prompts:
            if builder.rows_left:
                builder.add(sequence)

    def _make_room(self, sequence: Sequence) -> bool:
        """Gives a decoding sequence the block that its next row needs, if need be by preempting; False when it has to wait for one."""
        table = sequence.residence.table
        while sequence.residence.num_planned >= table.num_positions:
            if self.pool.num_free:
                table.append(self.pool.allocate(1))
            elif len(self._residents) > len(self._running):
                return False  # blocks come back with the steps in flight
            else:
                last = self._running[-1]
                self._stats.preemptions += 1
                self._leave(last, Status.PREEMPTED)
                if last is sequence:
                    return False
        return True

    def _admit_next(self, track: Track) -> Sequence | None:
        """Takes the head of the queue onto a lane, if a lane is free and all its tokens find blocks."""
        sequence = self._queue.head()
        if sequence is None and not self._residents:
            sequence = self._spare.head()
        if sequence is None or len(self._residents) >= self._config.max_lanes:
            return None
        position = self._restorable(sequence)
        shared = self._kv.blocks(sequence.chain, position)
        num_blocks = blocks_for(sequence.num_tokens, self._info.block_size)
        num_new = num_blocks - len(shared)
        # A block of room for each that runs already, lest the newcomer be preempted at once.
        if num_new + self.pool.num_idle(shared) + len(self._running) > self.pool.num_free:
            assert self._residents, "a sequence that cannot fit even alone was accepted"
            return None
        table = BlockTable(self._info.block_size)
        table.append(self._kv.hold(sequence.chain, position))
        table.append(self.pool.allocate(num_blocks - len(table.block_ids)))
        if sequence.cached_tokens is None and not sequence.request.alone:
            self._stats.prompt_tokens += sequence.prompt_len
            if self._uses_prefixes(sequence):
                self._stats.prefix_queries += sequence.prompt_len
                self._stats.prefix_hits += min(position, sequence.prompt_len)
                on_device = len(shared) * self._info.block_size
                self._stats.prefix_host_hits += max(min(position, sequence.prompt_len) - on_device, 0)
        self._queue_of(sequence).remove(sequence)
        sequence.admit(
            Residence(
                seq_id=next(self._seq_ids),
                track=track.name,
                table=table,
                num_restored=position,
                num_planned=position,
                num_computed=position,
                num_published=position // self._info.block_size,
            )
        )
        self._residents[sequence.residence.seq_id] = sequence
        bisect.insort(self._running, sequence, key=lambda other: other.rank)
        return sequence

    def _uses_prefixes(self, sequence: Sequence) -> bool:
        return self._config.prefix_cache and sequence.request.use_prefix_cache

    def _restorable(self, sequence: Sequence) -> int:
        """Longest position that all kinds of state can restore. The last token is always run again: its logits are kept nowhere."""
        if not self._uses_prefixes(sequence):
            return 0
        chain = sequence.chain
        limit = len(chain.token_ids) - 1
        others = [kind.positions(chain, limit) for kind in self._other_kinds]
        return longest_common([self._kv.positions(chain, limit), *others])

    def _hold_other_state(self, sequence: Sequence) -> tuple[tuple[str, int], ...]:
        """Holds what the shards have to restore beside blocks, until the step that does it is committed."""
        position = sequence.residence.num_restored
        if position == 0:
            return ()
        held = [(kind, kind.hold(sequence.chain, position)) for kind in self._other_kinds]
        self._held[sequence.residence.seq_id] = held
        return tuple((kind.name, handle) for kind, handle in held)

    def commit(self, step: Step, result: StepResult) -> list[Outcome]:
        """Takes in what a step produced, in the order in which the steps of its track were planned. Failed sequences are ended."""
        for begin in step.begins:
            for kind, handle in self._held.pop(begin.seq_id, ()):
                kind.release(handle)
        outcomes = []
        for lane in step.lanes:
            sequence = self._residents[lane.seq_id]
            sequence.residence.num_in_flight -= 1
            if sequence.status is not Status.ENDED and lane.seq_id not in result.failed:
                sampled = result.sampled.get(lane.seq_id, ())
                sequence.accept(lane, sampled)
                self._publish(sequence)
                if sampled:
                    outcomes.append(Outcome(sequence, sampled))
        for seq_id, message in result.failed.items():
            failed = self._residents.get(seq_id)
            if failed is not None and failed.status is not Status.ENDED:
                self.end(failed)
                outcomes.append(Outcome(failed, failure=message))
        for lane in step.lanes:
            self._release_if_idle(lane.seq_id)
        return outcomes

    def commit_failed(self, step: Step, message: str) -> list[Outcome]:
        """Takes in that a step failed as a whole: so did every sequence that it was about. What it said of ended ones is said again."""
        self._ends.extend(step.ends)
        told = {lane.seq_id for lane in step.lanes} | {begin.seq_id for begin in step.begins}
        told |= {append.seq_id for append in step.appends} | {observed.seq_id for observed in step.observed}
        return self.commit(step, StepResult(step.step_id, sampled={}, failed=dict.fromkeys(told, message)))

    def _publish(self, sequence: Sequence) -> None:
        """Makes blocks findable that are full and computed by now."""
        if not self._uses_prefixes(sequence):
            return
        residence = sequence.residence
        num_full = residence.num_computed // self._info.block_size
        for index in range(residence.num_published, num_full):
            self.pool.publish(residence.table.block_ids[index], sequence.chain.key(index))
        residence.num_published = max(residence.num_published, num_full)

    def _leave(self, sequence: Sequence, status: Status) -> None:
        self._running.remove(sequence)
        sequence.status = status
        self._release_if_idle(sequence.residence.seq_id)

    def _release_if_idle(self, seq_id: int) -> None:
        """Frees what a sequence held that has left its lane, once no step in flight reads it; a preempted one waits again from then on."""
        sequence = self._residents.get(seq_id)
        if sequence is None or sequence.status is Status.RUNNING or sequence.residence.num_in_flight:
            return
        residence = sequence.release()
        del self._residents[seq_id]
        self._ends.append(seq_id)
        self.pool.free(residence.table.block_ids)
        if sequence.status is Status.WAITING:
            self._queue_of(sequence).push(sequence)

    def check(self) -> None:
        """States the invariants; raises AssertionError where one does not hold."""
        self.pool.check()
        holders: dict[int, int] = {}
        for sequence in self._residents.values():
            for block_id in sequence.residence.table.block_ids:
                holders[block_id] = holders.get(block_id, 0) + 1
        assert self.pool.num_free + len(holders) == self.pool.num_blocks, "blocks are held by nobody, or free and held"
        assert len(self._residents) <= self._config.max_lanes
        assert self._running == sorted(self._running, key=lambda sequence: sequence.rank)
        assert all(sequence.status is Status.RUNNING for sequence in self._running)
        assert self._alone is None or len(self._running) == 1
        assert all(sequence.status is Status.WAITING for queue in (self._queue, self._spare) for sequence in queue)


def accepted(step: Step, result: StepResult) -> StepCommit:
    """All rows of every lane that did not fail are kept; drafts would make it fewer."""
    lanes = [lane for lane in step.lanes if lane.seq_id not in result.failed]
    return StepCommit(step.step_id, tuple((lane.seq_id, len(lane.tokens)) for lane in lanes))


def _joins(sequence: Sequence, track: Track) -> bool:
    """Whether a decoding sequence may go on on this track: it does already, or no step in flight reads it."""
    return sequence.residence.track == track.name or not sequence.residence.num_in_flight
