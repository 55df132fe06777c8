"""What the audit decides: who is sampled, what is whole, where it is run again, where two replies part."""

import pytest

from espalier.cluster.audit_decisions import choose_replica, first_difference, is_sampled, is_whole
from espalier.cluster.router import Candidate
from espalier.replicas.request import Finish, FinishReason, Timings, Usage

IDS = [f"chatcmpl-{number}-0" for number in range(4000)]


def finish(reason: FinishReason) -> Finish:
    return Finish(reason, Usage(1, 1, 0), "", Timings(0, 0, 0))


@pytest.mark.parametrize("share", [0.01, 0.25, 0.9])
def test_the_share_is_met(share: float) -> None:
    assert sum(is_sampled(request_id, share) for request_id in IDS) / len(IDS) == pytest.approx(share, abs=0.03)


def test_none_and_all() -> None:
    assert not any(is_sampled(request_id, 0.0) for request_id in IDS)
    assert all(is_sampled(request_id, 1.0) for request_id in IDS)


def test_a_larger_share_keeps_what_a_smaller_one_has() -> None:
    small = {request_id for request_id in IDS if is_sampled(request_id, 0.1)}
    assert small < {request_id for request_id in IDS if is_sampled(request_id, 0.2)}


def test_the_draw_is_the_same_everywhere() -> None:
    assert [number for number in range(40) if is_sampled(IDS[number], 0.1)] == [4, 13, 16, 31]


@pytest.mark.parametrize("reason", FinishReason)
def test_only_replies_that_ended_by_themselves_are_whole(reason: FinishReason) -> None:
    assert is_whole(finish(reason)) == (reason in (FinishReason.STOP, FinishReason.LENGTH))
    assert not is_whole(None)


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ({"a": 0, "b": 900}, "b"),
        ({"a": 0, "b": 900, "c": 5}, "c"),
        ({"a": 0, "c": 5, "b": 5}, "b"),
        ({"a": 7}, "a"),
        ({}, None),
    ],
    ids=["another one", "the least loaded", "ties by id", "the only one", "none"],
)
def test_where_a_reply_of_a_is_run_again(loads: dict[str, int], chosen: str | None) -> None:
    assert choose_replica("a", [Candidate(name, tokens) for name, tokens in loads.items()]) == chosen


@pytest.mark.parametrize(
    ("reply", "rerun", "index"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1], [1, 2, 3], 1),
        ([9], [], 0),
    ],
)
def test_where_two_replies_part(reply: list[int], rerun: list[int], index: int | None) -> None:
    assert first_difference(reply, rerun) == index
