"""The gateway's logic when replicas are lost or events go astray: replay, explicit errors, gaps, other attempts."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from espalier.replicas.errors import (
    DrainingError,
    EngineError,
    ReplicaLostError,
    RequestFailedError,
)
from espalier.replicas.request import TokenEvent
from tests.support.gateway_stage import Stage, begin, collect, error_of, ids, run
from tests.support.local_link import until


def test_a_replica_lost_before_any_token_costs_nothing() -> None:
    async def test() -> None:
        async with Stage() as stage:
            reply = begin(stage)
            await stage.started()
            stage.links[0].kill()
            await stage.started(2)
            assert stage.links[1].engine.submitted[0].attempt == 1
            stage.links[1].engine.round()
            for _ in range(3):
                stage.links[1].engine.round()
            events = await reply
            assert ids(events) == [8, 9, 10, 11]
            assert {event.replica for event in events} == {"replica-1"}

    run(test)


def test_a_replica_lost_during_the_hand_over_costs_nothing() -> None:
    async def test() -> None:
        async with Stage() as stage:
            stage.links[0].hold_submit.clear()
            reply = begin(stage)
            await until(lambda: any(replica.assigned for replica in stage.gateway.fleet.all()))
            stage.links[0].kill()
            await stage.started()
            for _ in range(4):
                stage.links[1].engine.round()
            assert len(ids(await reply)) == 4

    run(test)


def test_a_request_is_replayed_once_only() -> None:
    async def test() -> None:
        async with Stage(replicas=3) as stage:
            reply = begin(stage)
            await stage.started()
            stage.links[0].kill()
            await stage.started(2)
            next(link for link in stage.links[1:] if link.engine.submitted).kill()
            with pytest.raises(ReplicaLostError):
                await reply

    run(test)


def test_without_another_replica_the_loss_is_told() -> None:
    async def test() -> None:
        async with Stage(replicas=1) as stage:
            reply = begin(stage)
            await stage.started()
            stage.links[0].kill()
            with pytest.raises(EngineError):
                await reply
            assert stage.gateway.models()[0].ready_replicas == 0
            with pytest.raises(DrainingError):
                await begin(stage, call_id="next")

    run(test)


def test_a_replica_lost_after_a_token_ends_in_an_explicit_error() -> None:
    async def test() -> None:
        async with Stage() as stage:
            stream = stage.gateway.generate(stage.call())
            first = asyncio.ensure_future(anext(stream))
            await stage.started()
            stage.round()
            events = [await first]
            stage.links[0].kill()
            events += await collect(stream)
            assert isinstance(error_of(events), ReplicaLostError)
            assert ids(events) == [8]
            assert stage.links[1].engine.submitted == []

    run(test)


def altered(
    change: Callable[[TokenEvent], list[TokenEvent]],
) -> Callable[[tuple[TokenEvent, ...]], tuple[TokenEvent, ...]]:
    return lambda events: tuple(new for event in events for new in change(event))


def test_events_of_another_attempt_are_dropped() -> None:
    async def test() -> None:
        async with Stage(replicas=1) as stage:
            stage.links[0].alter = altered(lambda event: [replace(event, attempt=7, token_ids=(99,)), event])
            reply = begin(stage)
            await stage.started()
            stage.round(4)
            assert ids(await reply) == [8, 9, 10, 11]

    run(test)


@pytest.mark.parametrize(
    "change",
    [
        lambda event: [] if event.first_index == 1 else [event],
        lambda event: [event, event] if event.first_index == 1 else [event],
        lambda event: [replace(event, token_ids=(99,))] if event.first_index == 1 else [event],
    ],
    ids=["lost", "twice", "changed"],
)
def test_tokens_that_do_not_fit_together_end_in_an_explicit_error(
    change: Callable[[TokenEvent], list[TokenEvent]],
) -> None:
    async def test() -> None:
        async with Stage(replicas=1) as stage:
            stage.links[0].alter = altered(change)
            reply = begin(stage)
            await stage.started()
            stage.round(4)
            assert isinstance(error_of(await reply), RequestFailedError)
            await stage.until_gone()

    run(test)
