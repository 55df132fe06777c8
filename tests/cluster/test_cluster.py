"""Equal tokens however a request comes and wherever it runs, and slots and blocks that come back when clients leave. On a real cluster."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpx
import pytest

from tests.cluster.conftest import LiveCluster
from tests.support.cluster_clients import GRPC, HTTP_STREAMED, HTTP_WHOLE, Answer, Ask, Road, Roads

pytestmark = pytest.mark.cluster

GREEDY = Ask()
SEEDED = Ask(temperature=0.9, seed=2**64 - 3)
ROADS = pytest.mark.parametrize("road", [HTTP_WHOLE, HTTP_STREAMED, GRPC], ids=["http", "sse", "grpc"])
ASKS = [Ask(content=f"Question {i}: " + "word " * (3 * i), temperature=0.8 * (i % 2), seed=i) for i in range(16)]


T = TypeVar("T")


def talk(cluster: LiveCluster, talking: Callable[[Roads], Awaitable[T]]) -> T:
    async def inside() -> T:
        async with Roads(cluster.http_url, cluster.grpc_address, cluster.model) as roads:
            return await talking(roads)

    return asyncio.run(inside())


@pytest.fixture(scope="module")
def alone(cluster: LiveCluster) -> list[Answer]:
    """ASKS, one after the other."""

    async def talking(roads: Roads) -> list[Answer]:
        return [await roads.http_whole(ask) for ask in ASKS]

    return talk(cluster, talking)


@pytest.mark.parametrize("ask", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_every_road_gives_the_same_tokens_and_text(cluster: LiveCluster, ask: Ask) -> None:
    async def talking(roads: Roads) -> list[Answer]:
        return [await road(roads, ask) for road in (HTTP_WHOLE, HTTP_STREAMED, GRPC)]

    whole, sse, grpc = talk(cluster, talking)
    assert whole.whole and sse.whole and grpc.whole
    assert whole.token_ids == sse.token_ids == grpc.token_ids
    assert len(whole.token_ids) == ask.max_tokens
    assert whole.text == sse.text == grpc.text
    assert sse.pieces > 2 and grpc.pieces > 2


@ROADS
def test_sixteen_at_once_are_the_same_as_alone(cluster: LiveCluster, alone: list[Answer], road: Road) -> None:
    answers = talk(cluster, lambda roads: roads.together(ASKS, road))
    assert all(answer.whole for answer in answers)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]
    assert len({answer.sha256 for answer in alone}) > 12


def test_both_replicas_give_the_same_tokens(cluster: LiveCluster) -> None:
    # More at once than one replica is given while the other is idle.
    answers = talk(cluster, lambda roads: roads.together([GREEDY] * 16 + [SEEDED] * 16, HTTP_WHOLE))
    for same in (answers[:16], answers[16:]):
        assert {answer.replica for answer in same} == cluster.replica_ids()
        assert len({answer.sha256 for answer in same}) == 1
        assert all(answer.whole for answer in same)


def test_choices_are_replies_of_their_own(cluster: LiveCluster) -> None:
    body = {
        "model": cluster.model,
        "messages": [{"role": "user", "content": "Hello"}],
        "temperature": 1,
        "seed": 5,
        "max_tokens": 12,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    one = httpx.post(f"{cluster.http_url}/v1/chat/completions", json=body, timeout=60).json()
    three = httpx.post(f"{cluster.http_url}/v1/chat/completions", json=body | {"n": 3}, timeout=60).json()
    ids = [choice["token_ids"] for choice in three["choices"]]
    assert ids[0] == one["choices"][0]["token_ids"]
    assert len({tuple(choice) for choice in ids}) == 3


def test_a_prefix_is_reused_on_the_replica_that_has_it(cluster: LiveCluster) -> None:
    ask = Ask(content="A long beginning. " * 8, max_tokens=4)

    async def talking(roads: Roads) -> tuple[Answer, Answer]:
        return await roads.http_whole(ask), await roads.http_whole(ask)

    cold, warm = talk(cluster, talking)
    assert warm.cached_tokens >= 64
    assert warm.replica == cold.replica
    assert warm.token_ids == cold.token_ids


@pytest.mark.parametrize("road", [HTTP_STREAMED, GRPC], ids=["sse", "grpc"])
def test_fifty_clients_that_leave_free_everything(cluster: LiveCluster, road: Road) -> None:
    pick = random.Random(1)
    asks = [Ask(content=f"Abandoned {i}", max_tokens=200) for i in range(50)]
    leave_after = [pick.randrange(0, 30) for _ in asks]

    async def leave(roads: Roads, ask: Ask, pieces: int) -> None:
        if road is GRPC:
            call = roads.grpc_call(ask)
            for _ in range(pieces):
                await call.read()
            call.cancel()
            return
        events = roads.http_events(ask)
        for _ in range(pieces):
            await anext(events)
        await events.aclose()

    async def talking(roads: Roads) -> tuple[Answer, Answer]:
        before = await road(roads, GREEDY)
        await asyncio.gather(*map(leave, [roads] * 50, asks, leave_after))
        return before, await road(roads, GREEDY)

    cluster.wait_until_idle()
    before, after = talk(cluster, talking)
    assert after.whole
    assert after.token_ids == before.token_ids
    cluster.wait_until_idle()


def test_the_probes_and_serve_itself_answer(cluster: LiveCluster) -> None:
    assert httpx.get(f"{cluster.http_url}/health").status_code == 200
    assert httpx.get(f"{cluster.http_url}/ready").status_code == 200
    assert len(cluster.replica_ids()) == 2
    assert len(cluster.metric("espalier_num_requests_running")) == 2
