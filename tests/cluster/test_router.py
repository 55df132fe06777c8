"""Router: the cost of load against held prefixes and sessions, bounds on both, and the same answer every time."""

import random

import pytest

from espalier.cluster.config import RouterConfig
from espalier.cluster.router import Candidate, Router

BLOCK = 16
PROMPT = tuple(range(100, 164))  # four blocks
OTHER = tuple(range(300, 364))


def router(**changes: float) -> Router:
    return Router(RouterConfig(**changes), BLOCK)


def candidates(*outstanding: int) -> list[Candidate]:
    return [Candidate(name, tokens) for name, tokens in zip("abcdef", outstanding, strict=False)]


def test_the_least_loaded_replica_comes_first() -> None:
    ranking = router().rank(PROMPT, None, candidates(30, 10, 20), now=0)
    assert ranking.replicas == ("b", "c", "a")
    assert ranking.kind == "load"


def test_ties_go_by_replica_id_whatever_the_order_of_the_candidates() -> None:
    equal = candidates(5, 5, 5, 5)
    for _ in range(10):
        random.shuffle(equal)
        assert router().rank(PROMPT, None, equal, now=0).replicas == ("a", "b", "c", "d")


def test_a_held_prefix_is_worth_its_tokens() -> None:
    r = router()
    r.record("b", PROMPT, None, now=0)
    near = r.rank(PROMPT, None, candidates(0, 63), now=0)
    assert near.replicas == ("b", "a")
    assert near.kind == "prefix"
    assert r.rank(PROMPT, None, candidates(0, 65), now=0).replicas == ("a", "b")
    assert r.rank(OTHER, None, candidates(0, 63), now=0).replicas == ("a", "b")


def test_only_the_common_prefix_counts() -> None:
    r = router()
    r.record("b", PROMPT[:32] + OTHER, None, now=0)
    assert r.rank(PROMPT, None, candidates(0, 31), now=0).replicas == ("b", "a")
    assert r.rank(PROMPT, None, candidates(0, 33), now=0).replicas == ("a", "b")


def test_a_prefix_below_the_minimum_attracts_nothing() -> None:
    r = router(affinity_min_tokens=33)
    r.record("b", PROMPT[:32], None, now=0)
    ranking = r.rank(PROMPT, None, candidates(0, 1), now=0)
    assert ranking.replicas == ("a", "b")
    assert ranking.kind == "load"


@pytest.mark.parametrize(("outstanding", "first"), [(100, "b"), (101, "a")])
def test_neither_prefix_nor_session_attracts_beyond_the_excess(outstanding: int, first: str) -> None:
    r = router(affinity_max_excess=100)
    long = tuple(range(16_000))
    r.record("b", long, "session", now=0)
    assert r.rank(long, None, candidates(0, outstanding), now=0).replicas[0] == first
    assert r.rank(OTHER, "session", candidates(0, outstanding), now=0).replicas[0] == first


def test_a_session_comes_before_a_prefix_until_it_is_too_old() -> None:
    r = router(session_ttl_s=60)
    r.record("a", PROMPT, None, now=0)
    r.record("b", OTHER, "session", now=0)
    sticky = r.rank(PROMPT, "session", candidates(0, 0), now=60)
    assert sticky.replicas == ("b", "a")
    assert sticky.kind == "session"
    assert r.rank(PROMPT, "session", candidates(0, 0), now=61).kind == "prefix"


def test_a_replica_that_is_gone_is_forgotten() -> None:
    r = router()
    r.record("b", PROMPT, None, now=0)
    r.forget("b")
    assert r.rank(PROMPT, None, candidates(0, 1), now=0).replicas == ("a", "b")


def test_a_session_whose_replica_is_gone_finds_another() -> None:
    r = router()
    r.record("z", PROMPT, "session", now=0)
    assert r.rank(PROMPT, "session", candidates(3, 1), now=1).replicas == ("b", "a")
