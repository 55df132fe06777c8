"""The replica's side of a link: one stream a gateway, events sorted by owner, requests that end with their stream, replicas that may not serve."""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from espalier.cluster import outbox as outbox_module
from espalier.cluster.messages import ReplicaReport
from espalier.cluster.replica import EngineReplica
from espalier.replicas.errors import CheckpointError, DrainingError, QueueFullError
from espalier.replicas.request import Request, SamplingParams
from tests.support.fake_engine import INFO, FakeEngine, reply_of
from tests.support.local_link import MODEL


def request(request_id: str, max_tokens: int = 4) -> Request:
    return Request(request_id=request_id, prompt_token_ids=(1, 2, 3), params=SamplingParams(max_tokens=max_tokens))


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def tokens(report: ReplicaReport) -> dict[str, tuple[int, ...]]:
    return {event.request_id: event.token_ids for event in report.events}


def test_each_gateway_gets_the_events_of_its_own_requests_and_all_get_the_load() -> None:
    async def test() -> None:
        engine = FakeEngine()
        replica = EngineReplica(MODEL, None, lambda _: (engine, INFO))
        one, two = replica.attach("one"), replica.attach("two")
        for stream in (one, two):
            first = await anext(stream)
            assert first.events == ()
            assert first.stats is not None
        await replica.submit("one", request("a"))
        await replica.submit("two", request("b"))
        engine.round()
        for stream, mine in ((one, "a"), (two, "b")):
            report = await anext(stream)
            assert tokens(report) == {mine: (4,)}
            assert report.load.running == 2

    run(test())


def test_a_slow_reader_gets_all_rounds_in_one_message() -> None:
    async def test() -> None:
        engine = FakeEngine()
        replica = EngineReplica(MODEL, None, lambda _: (engine, INFO))
        stream = replica.attach("one")
        await anext(stream)
        await replica.submit("one", request("a"))
        for _ in range(4):
            engine.round()
        await asyncio.sleep(0)
        report = await anext(stream)
        assert [event.token_ids[0] for event in report.events] == reply_of(request("a"))
        assert report.events[-1].finish is not None

    run(test())


def test_a_request_needs_a_stream() -> None:
    async def test() -> None:
        replica = EngineReplica(MODEL, None, lambda _: (FakeEngine(), INFO))
        with pytest.raises(DrainingError):
            await replica.submit("one", request("a"))

    run(test())


def test_what_the_engine_refuses_is_refused_and_owned_by_nobody() -> None:
    async def test() -> None:
        engine = FakeEngine()
        replica = EngineReplica(MODEL, None, lambda _: (engine, INFO))
        stream = replica.attach("one")
        await anext(stream)
        engine.refuse = QueueFullError("full", retry_after_s=2)
        with pytest.raises(QueueFullError):
            await replica.submit("one", request("a"))
        await stream.aclose()
        assert engine.aborted == []

    run(test())


def test_the_requests_of_a_stream_that_ends_are_aborted() -> None:
    async def test() -> None:
        engine = FakeEngine()
        replica = EngineReplica(MODEL, None, lambda _: (engine, INFO))
        one, two = replica.attach("one"), replica.attach("two")
        await anext(one)
        await anext(two)
        await replica.submit("one", request("a"))
        await replica.submit("two", request("b"))
        await one.aclose()
        assert engine.aborted == ["a"]
        assert engine.load().running == 1

    run(test())


def test_attaching_anew_ends_the_old_stream_and_its_requests_only() -> None:
    async def test() -> None:
        engine = FakeEngine()
        replica = EngineReplica(MODEL, None, lambda _: (engine, INFO))
        old = replica.attach("one")
        await anext(old)
        await replica.submit("one", request("a"))
        new = replica.attach("one")
        await anext(new)
        assert engine.aborted == ["a"]
        await replica.submit("one", request("b"))
        with pytest.raises(StopAsyncIteration):
            await anext(old)
        assert engine.aborted == ["a"]
        engine.round()
        assert tokens(await anext(new)) == {"b": (4,)}

    run(test())


def test_a_gateway_that_does_not_read_must_attach_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_WAITING_EVENTS", 2)

    async def test() -> None:
        engine = FakeEngine()
        replica = EngineReplica(MODEL, None, lambda _: (engine, INFO))
        stream = replica.attach("one")
        await anext(stream)
        await replica.submit("one", request("a"))
        for _ in range(3):
            engine.round()
        await asyncio.sleep(0)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert engine.aborted == ["a"]

    run(test())


def test_a_stream_ends_when_its_gateway_tells_no_more_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espalier.cluster.replica.HEARTBEAT_S", 0.01)
    monkeypatch.setattr("espalier.cluster.replica.LEASE_S", 0.2)

    async def test() -> None:
        engine = FakeEngine()
        replica = EngineReplica(MODEL, None, lambda _: (engine, INFO))
        stream = replica.attach("one")
        await anext(stream)
        await replica.submit("one", request("a"))
        began = time.monotonic()
        while time.monotonic() - began < 0.3:
            await replica.renew("one")
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            while True:
                await anext(stream)
        assert engine.aborted == ["a"]

    run(test())


def test_an_idle_replica_still_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espalier.cluster.replica.HEARTBEAT_S", 0.01)

    async def test() -> None:
        replica = EngineReplica(MODEL, None, lambda _: (FakeEngine(), INFO))
        stream = replica.attach("one")
        for _ in range(3):
            assert (await anext(stream)).load.running == 0

    run(test())


def test_a_model_that_may_not_serve_leaves_the_replica_up_with_the_reason() -> None:
    def refuse(_: object) -> Any:
        raise CheckpointError("model.safetensors: these weights compute something else than they did")

    async def test() -> None:
        replica = EngineReplica(MODEL, None, refuse)
        description = await replica.describe()
        assert description.info is None
        assert description.failure is not None and "something else" in description.failure.message
        await replica.check_health()
        with pytest.raises(DrainingError):
            await anext(replica.attach("one"))

    run(test())


def test_an_engine_that_is_stuck_fails_the_health_check() -> None:
    async def test() -> None:
        engine = FakeEngine()
        replica = EngineReplica(MODEL, None, lambda _: (engine, INFO))
        await replica.check_health()
        engine.stuck = True
        with pytest.raises(RuntimeError, match="no rounds"):
            await replica.check_health()

    run(test())
