"""Sequence: one request's progress on this replica, as the scheduler sees it. Knows neither text nor wire."""

import enum
from collections import deque
from dataclasses import dataclass, field

from espalier.replicas.cache.prefix import PrefixChain
from espalier.replicas.cache.table import BlockTable
from espalier.replicas.request import Request
from espalier.replicas.schedule.step import Lane, SampledToken, TokenRef


class Status(enum.Enum):
    """WAITING: in the queue. RUNNING: holds a lane. PREEMPTED, ENDED: may still hold blocks until the last step that reads them is done."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True, kw_only=True)
class Residence:
    """What the shards hold of a sequence between one admission and its release. Preemption ends it; the next admission makes a new one.

    seq_id: never used again. track: the one that runs it now; all its steps in flight are on that one. table: its blocks.
    num_restored: positions taken from the prefix cache.
    num_planned: positions that steps compute, in flight or done. num_computed: positions whose step is done. num_published: blocks findable.
    refs: tokens sampled by steps in flight, in order. num_in_flight: steps in flight that read its blocks.
    num_blocks_sent, num_observed: how much of the table and of the restored tokens the shards have been told. num_blocks_filled: of the restored
    blocks, those whose state is on the device, as far as steps have been told.
    """

    seq_id: int
    track: str
    table: BlockTable
    num_restored: int
    num_planned: int
    num_computed: int
    num_published: int
    refs: deque[TokenRef] = field(default_factory=deque)
    num_in_flight: int = 0
    num_blocks_sent: int = 0
    num_observed: int = 0
    num_blocks_filled: int = 0


class Sequence:
    """A request with the tokens it has so far.

    order: of arrival on this replica. deadline: in seconds of the engine's monotonic clock. cached_tokens: prompt tokens that its first
    admission restored; None before.
    """

    __slots__ = ("_residence", "cached_tokens", "chain", "deadline", "order", "request", "status")

    def __init__(self, request: Request, chain: PrefixChain, *, order: int, deadline: float | None) -> None:
        self.request = request
        self.chain = chain
        self.order = order
        self.deadline = deadline
        self.status = Status.WAITING
        self.cached_tokens: int | None = None
        self._residence: Residence | None = None

    @property
    def rank(self) -> tuple[int, int]:
        """Smaller goes first: by priority, then by arrival."""
        return (-self.request.priority, self.order)

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens on the host: prompt and generated."""
        return len(self.chain.token_ids)

    @property
    def max_len(self) -> int:
        """Tokens when the reply is as long as it may be, the prompt included."""
        return self.prompt_len + self.request.params.max_tokens

    @property
    def num_computed(self) -> int:
        """Tokens whose state is in storage."""
        return 0 if self._residence is None else self._residence.num_computed

    @property
    def residence(self) -> Residence:
        """What the shards hold of it; only while it is admitted and not released."""
        assert self._residence is not None, "the sequence is not admitted"
        return self._residence

    def admit(self, residence: Residence) -> None:
        """From the queue to a lane."""
        assert self._residence is None and self.status is Status.WAITING
        self._residence = residence
        self.status = Status.RUNNING
        if self.cached_tokens is None:
            self.cached_tokens = min(residence.num_restored, self.prompt_len)

    def release(self) -> Residence:
        """Gives up what the shards hold of it; a preempted sequence is a waiting one from here on."""
        residence = self.residence
        assert residence.num_in_flight == 0, "a step in flight reads its blocks"
        self._residence = None
        if self.status is Status.PREEMPTED:
            self.status = Status.WAITING
        return residence

    @property
    def num_to_plan(self) -> int:
        """Rows that can be planned now; 0 when all tokens that it will have are sampled or under way."""
        num_known = self.num_tokens + len(self.residence.refs)
        return num_known - self.residence.num_planned if num_known < self.max_len else 0

    @property
    def decodes(self) -> bool:
        """Whether it goes on by one row. Not with its first row: the shards may have to be told much before that."""
        return self.num_to_plan == 1 and self.residence.num_planned > self.residence.num_restored

    def plan(self, num_rows: int, *, step_id: int, first_row: int) -> Lane:
        """Takes the next rows into step `step_id`, whose row `first_row` is the first of them. The row of the last known token is sampled from."""
        residence = self.residence
        assert 0 < num_rows <= self.num_to_plan
        start, stop = residence.num_planned, residence.num_planned + num_rows
        tokens: list[int | TokenRef] = list(self.chain.token_ids[start:stop])
        tokens += [residence.refs[position - self.num_tokens] for position in range(max(start, self.num_tokens), stop)]
        samples = stop == self.num_tokens + len(residence.refs)
        if samples:
            residence.refs.append(TokenRef(step_id, first_row + num_rows - 1))
        residence.num_planned = stop
        residence.num_in_flight += 1
        return Lane(residence.seq_id, start, tuple(tokens), num_sampled=int(samples))

    def accept(self, lane: Lane, sampled: tuple[SampledToken, ...]) -> None:
        """Takes what a finished step computed for it."""
        assert len(sampled) == lane.num_sampled, f"{len(sampled)} tokens for {lane.num_sampled} sampled rows"
        residence = self.residence
        residence.num_computed = lane.start + len(lane.tokens)
        for token in sampled:
            residence.refs.popleft()
            self.chain.token_ids.append(token.token_id)
