"""The waiting queue and the pure rules around it."""

import pytest

from espalier.replicas.cache.prefix import PrefixChain
from espalier.replicas.schedule.queue import WaitingQueue, expired, next_deadline, retry_after_s
from espalier.replicas.sequence import Sequence
from tests.support.rounds import make_request


def waiting(order: int, *, priority: int = 0, deadline: float | None = None) -> Sequence:
    request = make_request(str(order), [1], priority=priority)
    return Sequence(request, PrefixChain(b"", 16, [1]), order=order, deadline=deadline)


def test_larger_priority_first_then_arrival() -> None:
    queue = WaitingQueue(8)
    sequences = [waiting(0), waiting(1, priority=5), waiting(2), waiting(3, priority=5), waiting(4, priority=-1)]
    for sequence in reversed(sequences):
        queue.push(sequence)
    assert [sequence.order for sequence in queue] == [1, 3, 0, 2, 4]
    head = queue.head()
    assert head is sequences[1]
    queue.remove(sequences[1])
    assert queue.head() is sequences[3] and len(queue) == 4


def test_an_empty_queue_has_no_head() -> None:
    assert WaitingQueue(1).head() is None


def test_it_is_full_when_as_many_wait_as_may_beyond_the_free_lanes() -> None:
    queue = WaitingQueue(2)
    queue.push(waiting(0))
    queue.push(waiting(1))
    assert queue.is_full(num_free_lanes=0) and not queue.is_full(num_free_lanes=1)
    assert WaitingQueue(0).is_full(0) and not WaitingQueue(0).is_full(1)


def test_deadlines_are_compared_with_the_reading_passed_in() -> None:
    sequences = [waiting(0, deadline=5.0), waiting(1), waiting(2, deadline=3.0)]
    assert expired(sequences, 2.9) == []
    assert expired(sequences, 3.0) == [sequences[2]]
    assert expired(sequences, 9.0) == [sequences[0], sequences[2]]
    assert next_deadline(sequences) == 3.0
    assert next_deadline([waiting(0)]) is None


@pytest.mark.parametrize(
    ("num_waiting", "finished_at", "now", "seconds"),
    [
        (100, [], 50.0, 1.0),
        (100, [49.0], 50.0, 1.0),
        (10, [40.0, 45.0], 50.0, 25.0),
        (4, [49.8, 49.9, 50.0], 50.0, 1.0),
        (1000, [40.0, 45.0], 50.0, 60.0),
    ],
)
def test_retry_after_is_the_time_of_half_the_queue(
    num_waiting: int, finished_at: list[float], now: float, seconds: float
) -> None:
    assert retry_after_s(num_waiting, finished_at, now) == pytest.approx(seconds)
