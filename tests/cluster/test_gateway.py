"""The gateway's logic over fake replicas in this process: fan-out, demultiplexing, refusals, replay, loss, slow clients, deadlines, drain."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espalier.cluster.call import ChoiceEvent, GenerateCall
from espalier.cluster.catalog import ServedText
from espalier.cluster.config import ClusterConfig, GatewayConfig, ServedModel
from espalier.cluster.gateway import Gateway
from espalier.cluster.metrics import ClusterMetrics
from espalier.replicas.config import EngineConfig
from espalier.replicas.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
    ReplicaLostError,
    RequestFailedError,
)
from espalier.replicas.request import FinishReason, SamplingParams, TokenEvent
from espalier.replicas.sampling.seeds import choice_seed
from espalier.replicas.token_hash import token_sha256
from tests.support.fake_engine import load_fake_text
from tests.support.local_link import MODEL, LocalLink, until

PROMPT = (5, 6, 7)


class Clock:
    """Seconds that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Stage:
    """A gateway with fake replicas. Inside a running event loop."""

    def __init__(self, *, replicas: int = 2, gateway: GatewayConfig | None = None, **options: Any) -> None:
        self.clock = Clock()
        config = ClusterConfig(models=(MODEL,), gateway=gateway or GatewayConfig())
        self.gateway = Gateway(
            config, {MODEL.name: load_fake_text(MODEL)}, ClusterMetrics(version="0"), clock=self.clock, **options
        )
        self.links = [LocalLink(f"replica-{i}") for i in range(replicas)]
        for link in self.links:
            self.gateway.fleet.add(MODEL.name, link)

    async def __aenter__(self) -> "Stage":
        await until(lambda: len(self.gateway.fleet.ready(MODEL.name)) == len(self.links))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.gateway.fleet.close()

    def call(self, **changes: Any) -> GenerateCall:
        values: dict[str, Any] = {"call_id": "call", "model": MODEL.name, "prompt_token_ids": PROMPT}
        params = changes.pop("params", SamplingParams(max_tokens=4, seed=9))
        return GenerateCall(**(values | changes), params=params)

    async def started(self, num: int = 1) -> None:
        """Wait until so many requests have reached the engines, all together."""
        await until(lambda: sum(len(link.engine.submitted) for link in self.links) >= num)

    def owner(self) -> LocalLink:
        """The replica that was given the last request."""
        return max(self.links, key=lambda link: link.engine.load().running)

    def round(self, times: int = 1) -> None:
        for _ in range(times):
            for link in self.links:
                link.engine.round()

    async def until_gone(self) -> None:
        """Wait until no engine runs anything and the gateway knows of no call."""
        await until(lambda: all(link.engine.load().running == 0 for link in self.links))
        assert self.gateway._admission.outstanding == 0
        assert not self.gateway._choices
        assert not any(replica.assigned for replica in self.gateway.fleet.all())


async def collect(stream: AsyncGenerator[ChoiceEvent, None]) -> list[ChoiceEvent]:
    async with aclosing(stream):
        return [event async for event in stream]


def begin(stage: Stage, **changes: Any) -> "asyncio.Task[list[ChoiceEvent]]":
    return asyncio.create_task(collect(stage.gateway.generate(stage.call(**changes))))


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


def ids(events: list[ChoiceEvent], index: int = 0) -> list[int]:
    return [token for event in events if event.index == index for token in event.event.token_ids]


def error_of(events: list[ChoiceEvent]) -> EngineError:
    finish = events[-1].event.finish
    assert finish is not None and finish.reason is FinishReason.ERROR and finish.error is not None
    assert finish.token_sha256 == token_sha256(ids(events))
    assert finish.usage.completion_tokens == len(ids(events))
    return finish.error


def test_a_reply_arrives_whole_and_leaves_nothing_behind() -> None:
    async def test() -> None:
        async with Stage() as stage:
            reply = begin(stage)
            await stage.started()
            stage.round(4)
            events = await reply
            assert ids(events) == [8, 9, 10, 11]
            finish = events[-1].event.finish
            assert finish is not None and finish.reason is FinishReason.LENGTH
            assert {event.replica for event in events} == {"replica-0"}
            await stage.until_gone()

    run(test)


def test_choices_run_as_requests_of_their_own_with_seeds_of_their_own() -> None:
    async def test() -> None:
        async with Stage() as stage:
            reply = begin(stage, n=3)
            await stage.started(3)
            stage.round(4)
            events = await reply
            assert [ids(events, index) for index in range(3)] == [[8, 9, 10, 11]] * 3
            assert sum(event.event.finish is not None for event in events) == 3
            sent = sorted(
                (request for link in stage.links for request in link.engine.submitted), key=lambda r: r.request_id
            )
            assert [request.params.seed for request in sent] == [9, choice_seed(9, 1), choice_seed(9, 2)]
            assert {link.engine.submitted != [] for link in stage.links} == {True}, "load spreads over the replicas"
            await stage.until_gone()

    run(test)


def test_an_unknown_model_is_not_found() -> None:
    async def test() -> None:
        async with Stage() as stage:
            with pytest.raises(ModelNotFoundError):
                await collect(stage.gateway.generate(stage.call(model="other")))
            with pytest.raises(ModelNotFoundError):
                stage.gateway.text("other")

    run(test)


def test_what_no_replica_takes_is_refused_with_what_they_said() -> None:
    async def test() -> None:
        async with Stage() as stage:
            for link in stage.links:
                link.engine.refuse = QueueFullError("full", retry_after_s=3)
            with pytest.raises(QueueFullError) as refused:
                await begin(stage)
            assert refused.value.retry_after_s == 3
            await stage.until_gone()

    run(test)


def test_a_full_replica_is_passed_over() -> None:
    async def test() -> None:
        async with Stage() as stage:
            stage.links[0].engine.refuse = QueueFullError("full")
            reply = begin(stage)
            await stage.started()
            assert len(stage.links[1].engine.submitted) == 1
            stage.round(4)
            assert len(ids(await reply)) == 4

    run(test)


def test_an_invalid_request_is_refused_at_once_and_its_other_choices_end() -> None:
    async def test() -> None:
        async with Stage(replicas=1) as stage:
            engine = stage.links[0].engine
            submit = engine.submit

            def refuse_the_second(request: Any) -> None:
                if request.request_id.endswith("-1"):
                    raise InvalidRequestError("logit_bias: token id 600 is not in the vocabulary", param="logit_bias")
                submit(request)

            engine.submit = refuse_the_second  # type: ignore[method-assign]
            with pytest.raises(InvalidRequestError) as refused:
                await begin(stage, n=2)
            assert refused.value.param == "logit_bias"
            await stage.until_gone()
            assert "call-0" in engine.aborted

    run(test)


def test_more_than_the_bound_is_refused_before_any_engine_sees_it() -> None:
    async def test() -> None:
        async with Stage(gateway=GatewayConfig(max_outstanding=2)) as stage:
            reply = begin(stage, n=2)
            await stage.started(2)
            with pytest.raises(QueueFullError) as refused:
                await begin(stage, call_id="second")
            assert refused.value.retry_after_s is not None
            stage.round(4)
            await reply
            again = begin(stage, call_id="third")
            await stage.started(3)
            stage.round(4)
            assert len(ids(await again)) == 4

    run(test)


def test_a_client_that_leaves_frees_its_requests() -> None:
    async def test() -> None:
        async with Stage() as stage:
            stream = stage.gateway.generate(stage.call(n=2))
            first = asyncio.ensure_future(anext(stream))
            await stage.started(2)
            stage.round()
            await first
            await stream.aclose()
            await stage.until_gone()

    run(test)


def test_a_client_that_leaves_during_the_hand_over_frees_its_request_too() -> None:
    async def test() -> None:
        async with Stage(replicas=1) as stage:
            stage.links[0].hold_submit.clear()
            reply = begin(stage)
            await until(lambda: bool(stage.gateway.fleet.all()[0].assigned))
            reply.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reply
            stage.links[0].hold_submit.set()
            await stage.started()
            await stage.until_gone()

    run(test)


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


def test_a_client_that_does_not_read_is_given_up_and_its_neighbour_is_not() -> None:
    async def test() -> None:
        async with Stage(replicas=1, max_pending_events=3) as stage:
            slow = stage.gateway.generate(stage.call(call_id="slow", params=SamplingParams(max_tokens=100)))
            first = asyncio.ensure_future(anext(slow))
            await stage.started()
            stage.round()
            events = [await first]
            neighbour = begin(stage, call_id="neighbour", params=SamplingParams(max_tokens=10))
            await stage.started(2)
            for _ in range(10):
                stage.round()
                await asyncio.sleep(0.002)
            assert len(ids(await neighbour)) == 10
            assert stage.links[0].engine.load().running == 0
            events += await collect(slow)
            assert isinstance(error_of(events), RequestFailedError)
            assert len(ids(events)) == 4

    run(test)


def test_the_deadline_ends_what_the_engine_has_not_ended() -> None:
    async def test() -> None:
        async with Stage(replicas=1, deadline_grace_s=0.01) as stage:
            with pytest.raises(DeadlineExceededError):
                await begin(stage, deadline=stage.clock.now + 0.01)
            assert stage.links[0].engine.submitted[0].deadline == stage.clock.now + 0.01
            await stage.until_gone()

    run(test)


def test_requests_without_a_deadline_get_the_default() -> None:
    async def test() -> None:
        async with Stage(replicas=1, gateway=GatewayConfig(default_deadline_s=50)) as stage:
            reply = begin(stage)
            await stage.started()
            assert stage.links[0].engine.submitted[0].deadline == stage.clock.now + 50
            stage.round(4)
            await reply

    run(test)


def test_a_drain_refuses_the_new_and_lets_the_running_finish() -> None:
    async def test() -> None:
        async with Stage() as stage:
            reply = begin(stage)
            await stage.started()
            drain = asyncio.create_task(stage.gateway.drain(10))
            await until(lambda: stage.gateway.draining)
            assert (await stage.gateway.readiness())[0] is False
            with pytest.raises(DrainingError):
                await begin(stage, call_id="late")
            stage.round(4)
            assert len(ids(await reply)) == 4
            await drain

    run(test)


def test_a_drain_that_takes_too_long_ends_the_rest_with_an_error() -> None:
    async def test() -> None:
        async with Stage() as stage:
            stream = stage.gateway.generate(stage.call())
            first = asyncio.ensure_future(anext(stream))
            await stage.started()
            stage.round()
            events = [await first]
            drain = asyncio.create_task(stage.gateway.drain(0.01))
            events += await collect(stream)
            assert isinstance(error_of(events), DrainingError)
            await drain
            await stage.until_gone()

    run(test)


def test_a_replica_that_leaves_finishes_what_it_runs_and_gets_nothing_new() -> None:
    async def test() -> None:
        async with Stage() as stage:
            reply = begin(stage)
            await stage.started()
            stage.gateway.fleet.remove("replica-0")
            second = begin(stage, call_id="second")
            await stage.started(2)
            assert len(stage.links[1].engine.submitted) == 1
            stage.round(4)
            assert len(ids(await reply)) == len(ids(await second)) == 4
            await until(lambda: stage.gateway.fleet.ids(MODEL.name) == {"replica-1"})

    run(test)


def test_a_session_keeps_its_replica() -> None:
    async def test() -> None:
        async with Stage() as stage:
            for turn in range(3):
                filler = begin(stage, call_id=f"filler{turn}", params=SamplingParams(max_tokens=300))
                reply = begin(stage, call_id=f"turn{turn}", session="me", params=SamplingParams(max_tokens=1))
                await stage.started(2 * (turn + 1))
                stage.round()
                assert len(ids(await reply)) == 1
                stage.round(299)
                await filler
            turns = [[r for r in link.engine.submitted if r.request_id.startswith("turn")] for link in stage.links]
            assert sorted(map(len, turns)) == [0, 3]

    run(test)


def test_readiness_needs_progress_or_idleness() -> None:
    async def test() -> None:
        async with Stage(replicas=1) as stage:
            assert (await stage.gateway.readiness())[0] is True
            reply = begin(stage)
            await stage.started()
            stage.round()
            await until(lambda: bool(stage.gateway.fleet.all()[0].load and stage.gateway.fleet.all()[0].load.running))
            stage.clock.now += 11
            ready, report = await stage.gateway.readiness()
            assert ready is False
            assert "no round" in report["models"][MODEL.name]["replicas"]["replica-0"]
            stage.round()
            await until(lambda: stage.gateway.fleet.ready(MODEL.name) != [])
            assert (await stage.gateway.readiness())[0] is True
            stage.round(2)
            await reply

    run(test)


def test_a_model_without_text_or_replica_says_why() -> None:
    async def test() -> None:
        refused = ServedText(text=None, failure="tokenizer.json: is missing", defaults={}, created=0)
        other = ServedModel(name="other", engine=EngineConfig(model_path=Path("nowhere")))
        config = ClusterConfig(models=(MODEL, other))
        gateway = Gateway(
            config, {MODEL.name: load_fake_text(MODEL), "other": refused}, ClusterMetrics(version="0"), clock=Clock()
        )
        ready, report = await gateway.readiness()
        assert ready is False
        assert report["models"]["other"]["failure"] == "tokenizer.json: is missing"
        assert "failure" not in report["models"][MODEL.name]
        with pytest.raises(DrainingError, match="is missing"):
            gateway.text("other")
        with pytest.raises(DrainingError, match="no replica"):
            gateway.text(MODEL.name)
        assert [info.ready_replicas for info in gateway.models()] == [0, 0]

    run(test)


def test_metrics_show_the_replicas_that_are_there_and_no_others() -> None:
    async def test() -> None:
        async with Stage() as stage:
            text = stage.gateway.metrics_text().decode()
            assert 'espalier_num_requests_running{model="fake-model",replica="replica-0"}' in text
            stage.links[0].kill()
            await until(lambda: stage.gateway.fleet.ids(MODEL.name) == {"replica-1"})
            text = stage.gateway.metrics_text().decode()
            assert "replica-0" not in text
            assert 'espalier_gateway_replica_losses_total{model="fake-model"} 1.0' in text

    run(test)


def test_a_call_leaves_one_log_line_without_text_or_ids(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with Stage() as stage:
            reply = begin(stage)
            await stage.started()
            stage.round(4)
            await reply

    with caplog.at_level(logging.INFO, logger="espalier"):
        run(test)
    [record] = [record for record in caplog.records if record.getMessage() == "request"]
    assert record.__dict__["outcome"] == "ok"
    assert record.__dict__["completion_tokens"] == 4
    assert not any(isinstance(value, list | tuple) and list(value) == list(PROMPT) for value in vars(record).values())
