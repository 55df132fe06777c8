"""Who waits, in what order, until when. Pure: the clock's reading is passed in."""

import bisect
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from operator import attrgetter

from espalier.replicas.sequence import Sequence

_rank = attrgetter("rank")


class WaitingQueue:
    """Sequences by priority (larger first), then by arrival. Bounded for newcomers; a preempted sequence always gets its place back."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._waiting: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def is_full(self, num_free_lanes: int) -> bool:
        """Whether a newcomer has to be turned away; those for whom a lane is free do not count as waiting."""
        return len(self._waiting) >= self._max_waiting + num_free_lanes

    def push(self, sequence: Sequence) -> None:
        """Puts a sequence in its place by rank."""
        bisect.insort(self._waiting, sequence, key=_rank)

    def head(self) -> Sequence | None:
        """Whose turn is next."""
        return self._waiting[0] if self._waiting else None

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it stands."""
        self._waiting.remove(sequence)


def expired(sequences: Iterable[Sequence], now: float) -> list[Sequence]:
    """Those whose deadline has passed."""
    return [sequence for sequence in sequences if sequence.deadline is not None and sequence.deadline <= now]


def next_deadline(sequences: Iterable[Sequence]) -> float | None:
    """When the first of them expires."""
    return min((sequence.deadline for sequence in sequences if sequence.deadline is not None), default=None)


def retry_after_s(num_waiting: int, finished_at: Seq[float], now: float) -> float:
    """When a full queue is worth another try: the time that half of it takes at the rate of the latest finishes. 1 .. 60 seconds."""
    if len(finished_at) < 2:
        return 1.0
    seconds_each = (now - finished_at[0]) / len(finished_at)
    return min(max(num_waiting / 2 * seconds_each, 1.0), 60.0)
