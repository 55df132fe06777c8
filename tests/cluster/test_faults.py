"""kill -9 of a replica under load: every accepted request ends in a full reply or an explicit error, and the cluster heals."""

import asyncio
import os
import signal

import pytest

from tests.cluster.conftest import LiveCluster, wait_until
from tests.support.cluster_clients import GRPC, HTTP_STREAMED, HTTP_WHOLE, Answer, Ask, Roads

pytestmark = pytest.mark.cluster

LOST = {"replica_lost", "ABORTED"}
GREEDY = Ask(content="Before and after.")


def test_a_killed_replica_loses_no_request_silently_and_is_replaced(cluster: LiveCluster) -> None:
    asks = [Ask(content=f"Under load {i}", temperature=0.5 * (i % 2), seed=i, max_tokens=400) for i in range(24)]
    # Looked for before there is load: it takes a while, and the load may be over by then.
    victim = cluster.replica_pids()[0]

    def generated() -> list[float]:
        return cluster.metric("espalier_generation_tokens_total")

    async def under_load() -> tuple[list[Answer], Answer]:
        async with Roads(cluster.http_url, cluster.grpc_address, cluster.model) as roads:
            before = await roads.http_whole(GREEDY)
            cluster.wait_until_idle()
            idle = generated()
            ways = [HTTP_WHOLE, HTTP_STREAMED, GRPC]
            answers = [asyncio.create_task(ways[i % 3](roads, ask)) for i, ask in enumerate(asks)]
            # Figures come once a second: by then every replica has requests with tokens.
            await asyncio.to_thread(
                wait_until, lambda: all(now > then for now, then in zip(generated(), idle, strict=True)), "all generate"
            )
            os.kill(victim, signal.SIGKILL)
            return await asyncio.gather(*answers), before

    async def afterwards() -> list[Answer]:
        async with Roads(cluster.http_url, cluster.grpc_address, cluster.model) as roads:
            return await roads.together([GREEDY] * 16, HTTP_WHOLE)

    old = cluster.replica_ids()
    answers, before = asyncio.run(under_load())
    for ask, answer in zip(asks, answers, strict=True):
        if answer.error is None:
            assert answer.whole and len(answer.token_ids) == ask.max_tokens
        else:
            assert answer.error in LOST, answer.details
    assert any(answer.error in LOST for answer in answers), "the killed replica was working"
    assert any(answer.whole for answer in answers), "the other replica was working"

    cluster.wait_until_healed()
    new = cluster.replica_ids()
    assert len(new - old) == 1
    after = asyncio.run(afterwards())
    assert {answer.sha256 for answer in after} == {before.sha256}
    assert {answer.replica for answer in after} == new, "the new replica serves, and gives the same tokens"
    cluster.wait_until_idle()
    assert len(cluster.metric("espalier_num_requests_running")) == 2, "the dead replica has left no series"
