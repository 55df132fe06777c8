"""The gateway's logic over fake replicas in this process: fan-out, refusals, slow clients, deadlines, drain, readiness."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from espalier.cluster.call import GenerateCall
from espalier.cluster.catalog import ServedText
from espalier.cluster.config import ClusterConfig, GatewayConfig, ServedModel
from espalier.cluster.gateway import Gateway
from espalier.cluster.metrics import ClusterMetrics
from espalier.replicas.config import EngineConfig
from espalier.replicas.errors import (
    CheckpointError,
    DeadlineExceededError,
    DrainingError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
    RequestFailedError,
)
from espalier.replicas.request import FinishReason, SamplingParams
from espalier.replicas.sampling.seeds import choice_seed
from tests.support.fake_engine import load_fake_text
from tests.support.gateway_stage import PROMPT, Clock, Stage, begin, collect, error_of, ids, run
from tests.support.local_link import MODEL, LocalLink, until


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
        refused = ServedText(text=None, failure=CheckpointError("tokenizer.json: is missing"), defaults={}, created=0)
        other = ServedModel(name="other", engine=EngineConfig(model_path=Path("nowhere")))
        config = ClusterConfig(models=(MODEL, other))
        gateway = Gateway(
            config, {MODEL.name: load_fake_text(MODEL), "other": refused}, ClusterMetrics(version="0"), clock=Clock()
        )
        ready, report = await gateway.readiness()
        assert ready is False
        assert report["models"]["other"]["failure"] == "tokenizer.json: is missing"
        assert report["models"]["other"]["failure_code"] == "checkpoint"
        assert "failure" not in report["models"][MODEL.name]
        with pytest.raises(DrainingError, match="is missing"):
            gateway.text("other")
        with pytest.raises(DrainingError, match="no replica"):
            gateway.text(MODEL.name)
        assert [info.ready_replicas for info in gateway.models()] == [0, 0]

    run(test)


def test_each_model_has_replicas_of_its_own() -> None:
    async def test() -> None:
        other = ServedModel(name="other", engine=EngineConfig(model_path=Path("nowhere")))
        texts = {name: load_fake_text(MODEL) for name in (MODEL.name, "other")}
        gateway = Gateway(ClusterConfig(models=(MODEL, other)), texts, ClusterMetrics(version="0"), clock=Clock())
        links = {name: LocalLink(f"of-{name}") for name in texts}
        gateway.fleet.add(MODEL.name, links[MODEL.name])
        await until(lambda: gateway.fleet.ready(MODEL.name) != [])
        assert (await gateway.readiness())[0] is False
        gateway.fleet.add("other", links["other"])
        await until(lambda: gateway.fleet.ready("other") != [])
        assert (await gateway.readiness())[0] is True
        params = SamplingParams(max_tokens=1)
        call = GenerateCall(call_id="call", model="other", prompt_token_ids=PROMPT, params=params)
        reply = asyncio.create_task(collect(gateway.generate(call)))
        await until(lambda: links["other"].engine.submitted != [])
        links["other"].engine.round()
        assert [event.replica for event in await reply] == ["of-other"]
        await gateway.fleet.close()

    run(test)


def test_a_bug_at_the_hand_over_is_a_failed_request_and_frees_its_place(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with Stage() as stage:

            def broken(_: Any) -> None:
                raise KeyError("a bug")

            for link in stage.links:
                link.engine.submit = broken  # type: ignore[method-assign]
            with pytest.raises(RequestFailedError):
                await begin(stage)
            await stage.until_gone()

    run(test)
    assert "submit failed" in caplog.text


def test_metrics_show_the_replicas_that_are_there_and_no_others() -> None:
    async def test() -> None:
        async with Stage() as stage:
            text = stage.gateway.metrics_text().decode()
            assert 'espalier_num_requests_running{model="fake-model",replica="replica-0"}' in text
            progress = 'espalier_replica_progress_timestamp_seconds{model="fake-model",replica="replica-0"}'
            assert f"{progress} {stage.clock()}" in text
            assert 'espalier_model_configured_replicas{model="fake-model"} 2.0' in text
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
