"""The exactness audit over fake replicas: equal and unequal re-runs, those that fail, bounds, and what it must not disturb."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from espalier.cluster.audit import MAX_AGE_S, MAX_PENDING
from espalier.cluster.config import GatewayConfig
from espalier.cluster.replica import EngineReplica
from espalier.replicas.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineError,
    QueueFullError,
    RequestFailedError,
)
from espalier.replicas.report import RoundReport
from espalier.replicas.request import Finish, FinishReason, Request, SamplingParams, Timings, TokenEvent, Usage
from espalier.replicas.sampling.seeds import choice_seed
from espalier.replicas.token_hash import token_sha256
from tests.support.fake_engine import INFO, FakeEngine, reply_of
from tests.support.gateway_stage import PROMPT, Stage, begin, ids, run
from tests.support.local_link import MODEL, LocalLink, until

ALL = GatewayConfig(audit_share=1.0)
REPLY = [8, 9, 10, 11]


def audit_stage(replicas: int = 2) -> Stage:
    return Stage(replicas=replicas, gateway=ALL)


def counted(stage: Stage, name: str = "espalier_audit_total") -> dict[str, int]:
    """The family's values that are not zero, by the label `result` (the pending ones have none)."""
    lines = [line for line in stage.gateway.metrics_text().decode().splitlines() if line.startswith(name + "{")]
    values = {line.partition('result="')[2].partition('"')[0]: int(float(line.rsplit(" ", 1)[1])) for line in lines}
    return {result: value for result, value in values.items() if value}


def pending(stage: Stage) -> int:
    return counted(stage, "espalier_audit_pending").get("", 0)


def reruns(stage: Stage) -> list[tuple[LocalLink, Request]]:
    return [(link, request) for link in stage.links for request in link.engine.submitted if request.alone]


async def finish_one(stage: Stage, **changes: object) -> None:
    """One whole reply of four tokens; call_id must be new."""
    before = sum(len(link.engine.submitted) for link in stage.links)
    reply = begin(stage, **changes)
    await stage.started(before + 1)
    stage.round(4)
    assert ids(await reply) == REPLY


async def finish_rerun(stage: Stage, num: int = 1) -> None:
    """Let the num-th re-run start and run to its end."""
    await until(lambda: len(reruns(stage)) == num)
    stage.round(4)


def test_a_reply_is_run_again_on_another_replica_alone_and_without_cache() -> None:
    async def test() -> None:
        async with audit_stage() as stage:
            params = SamplingParams(max_tokens=4, seed=9, temperature=0.7, stop=("x",))
            await finish_one(stage, params=params, priority=5, deadline=stage.clock.now + 60)
            await until(lambda: len(reruns(stage)) == 1)
            [(link, request)] = reruns(stage)
            assert link is stage.links[1], "the reply came from the first one"
            assert request == Request(
                request_id="audit-call-0",
                prompt_token_ids=PROMPT,
                params=replace(params, draft=False),
                deadline=stage.clock.now + MAX_AGE_S,
                use_prefix_cache=False,
                alone=True,
            )
            assert pending(stage) == 1 and counted(stage) == {}
            stage.round(4)
            await until(lambda: pending(stage) == 0)
            assert counted(stage) == {"equal": 1}
            await stage.until_gone()

    run(test)


def test_each_choice_is_run_again_with_its_own_seed_one_after_the_other() -> None:
    async def test() -> None:
        async with audit_stage() as stage:
            reply = begin(stage, n=3)
            await stage.started(3)
            stage.round(4)
            await reply
            for num in (1, 2, 3):
                await finish_rerun(stage, num)
            await until(lambda: pending(stage) == 0)
            assert counted(stage) == {"equal": 3}
            seeds = {request.request_id: request.params.seed for _, request in reruns(stage)}
            assert seeds == {f"audit-call-{i}": choice_seed(9, i) if i else 9 for i in range(3)}

    run(test)


@pytest.mark.parametrize(
    ("fault", "index"),
    [(lambda reply: [*reply[:2], 77, *reply[3:]], 2), (lambda reply: reply[:3], 3), (lambda reply: [*reply, 1], 4)],
    ids=["another token", "too short", "too long"],
)
def test_a_faulty_replica_is_found(
    fault: Callable[[list[int]], list[int]], index: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with audit_stage() as stage:
            stage.links[1].engine.reply_of = lambda request: fault(reply_of(request))
            await finish_one(stage)
            await finish_rerun(stage)
            stage.round()
            await until(lambda: pending(stage) == 0)
            assert counted(stage) == {"unequal": 1}

    run(test)
    [record] = [record for record in caplog.records if record.levelno >= logging.ERROR]
    told = vars(record)
    assert (told["request_id"], told["replica"], told["audit_replica"]) == ("call-0", "replica-0", "replica-1")
    assert told["token_sha256"] == token_sha256(REPLY)
    assert told["audit_token_sha256"] == token_sha256(fault(REPLY))
    assert told["first_difference"] == index
    assert told["numerics_id"] == told["audit_numerics_id"] == INFO.numerics_id
    # Counts and ids only: nothing that holds the prompt or the reply.
    assert not any(isinstance(value, list | tuple | bytes) for key, value in told.items() if key != "args")


def test_a_faulty_replica_is_found_by_a_sound_one() -> None:
    async def test() -> None:
        async with audit_stage() as stage:
            stage.links[0].engine.reply_of = lambda request: [1, 2, 3, 4]
            reply = begin(stage)
            await stage.started()
            stage.round(4)
            assert ids(await reply) == [1, 2, 3, 4]
            await finish_rerun(stage)
            await until(lambda: pending(stage) == 0)
            assert counted(stage) == {"unequal": 1}

    run(test)


def test_with_one_replica_it_is_the_same_one() -> None:
    async def test() -> None:
        async with audit_stage(replicas=1) as stage:
            await finish_one(stage)
            await finish_rerun(stage)
            await until(lambda: pending(stage) == 0)
            assert counted(stage) == {"equal": 1}

    run(test)


@pytest.mark.parametrize("change", [{"weights_id": "w"}, {"numerics_id": "n"}], ids=["weights", "numerics"])
def test_replicas_of_unequal_ids_are_not_compared(change: dict[str, str]) -> None:
    async def test() -> None:
        async with audit_stage(replicas=1) as stage:
            engine = FakeEngine()
            other = LocalLink("replica-9", EngineReplica(MODEL, None, lambda _: (engine, replace(INFO, **change))))
            stage.gateway.fleet.add(MODEL.name, other)
            await until(lambda: len(stage.gateway.fleet.ready(MODEL.name)) == 2)
            await finish_one(stage)
            await finish_rerun(stage)
            await until(lambda: pending(stage) == 0)
            assert counted(stage) == {"equal": 1}
            assert engine.submitted == []

    run(test)


def test_a_replica_lost_during_the_re_run_is_a_failure() -> None:
    async def test() -> None:
        async with audit_stage() as stage:
            await finish_one(stage)
            await until(lambda: len(reruns(stage)) == 1)
            stage.links[1].kill()
            await until(lambda: pending(stage) == 0)
            assert counted(stage) == {"failed": 1}
            # The next one finds the replica that is left.
            await finish_one(stage, call_id="next")
            await finish_rerun(stage, 2)
            await until(lambda: pending(stage) == 0)
            assert counted(stage) == {"failed": 1, "equal": 1}

    run(test)


def test_no_replica_left_is_a_failure() -> None:
    async def test() -> None:
        async with audit_stage(replicas=1) as stage:
            await finish_one(stage)
            await until(lambda: len(reruns(stage)) == 1)
            await finish_one(stage, call_id="next")
            stage.links[0].kill()
            await until(lambda: pending(stage) == 0)
            # The first re-run had ended with the second reply's rounds.
            assert counted(stage) == {"equal": 1, "failed": 1}

    run(test)


@pytest.mark.parametrize(
    ("refusal", "result"),
    [(DrainingError("stopping"), "failed"), (QueueFullError("full"), "dropped"), (ValueError("odd"), "failed")],
    ids=["draining", "full", "unforeseen"],
)
def test_a_re_run_that_is_refused(refusal: Exception, result: str) -> None:
    async def test() -> None:
        async with audit_stage() as stage:
            stage.links[1].engine.refuse = refusal  # type: ignore[assignment]
            await finish_one(stage)
            await until(lambda: counted(stage) == {result: 1})
            assert pending(stage) == 0
            stage.links[1].engine.refuse = None
            await finish_one(stage, call_id="next")
            await finish_rerun(stage)
            await until(lambda: counted(stage) == {result: 1, "equal": 1})

    run(test)


@pytest.mark.parametrize(
    ("error", "result"),
    [(RequestFailedError("computing failed"), "failed"), (DeadlineExceededError("no spare time"), "dropped")],
)
def test_a_re_run_that_ends_in_an_error(error: EngineError, result: str) -> None:
    async def test() -> None:
        async with audit_stage() as stage:
            await finish_one(stage)
            await until(lambda: len(reruns(stage)) == 1)
            finish = Finish(FinishReason.ERROR, Usage(3, 0, 0), token_sha256([]), Timings(0, 0, 0), error=error)
            event = TokenEvent("audit-call-0", 0, 0, (), "", finish=finish)
            engine = stage.links[1].engine
            stage.links[1].replica._on_round(RoundReport((event,), engine.load()))
            await until(lambda: counted(stage) == {result: 1})
            assert pending(stage) == 0

    run(test)


def test_tokens_lost_on_the_way_are_no_inequality() -> None:
    async def test() -> None:
        async with audit_stage() as stage:
            stage.links[1].alter = lambda events: tuple(event for event in events if event.first_index != 1)
            await finish_one(stage)
            await finish_rerun(stage)
            await until(lambda: counted(stage) == {"failed": 1})

    run(test)


def test_what_waits_is_bounded_and_the_rest_is_counted() -> None:
    async def test() -> None:
        async with audit_stage() as stage:
            # Held back, so that rounds for the replies do not run it.
            stage.links[1].hold_submit.clear()
            for number in range(MAX_PENDING + 3):
                reply = begin(stage, call_id=f"call-{number}", session="sticky")
                await stage.started(number + 1)
                stage.round(4)
                await reply
            assert pending(stage) == MAX_PENDING
            assert counted(stage) == {"dropped": 3}
            stage.links[1].hold_submit.set()
            for number in range(MAX_PENDING):
                await finish_rerun(stage, number + 1)
            await until(lambda: pending(stage) == 0)
            assert counted(stage) == {"dropped": 3, "equal": MAX_PENDING}

    run(test)


def test_one_that_waited_too_long_is_dropped() -> None:
    async def test() -> None:
        async with audit_stage() as stage:
            await finish_one(stage)
            await until(lambda: len(reruns(stage)) == 1)
            # The first re-run does not end, so the second reply waits behind it.
            stage.links[1].alter = lambda events: ()
            await finish_one(stage, call_id="old")
            assert pending(stage) == 2
            stage.clock.now += MAX_AGE_S
            stage.links[1].kill()
            await until(lambda: pending(stage) == 0)
            assert counted(stage) == {"failed": 1, "dropped": 1}

    run(test)


def test_what_did_not_end_by_itself_is_not_audited() -> None:
    async def test() -> None:
        async with audit_stage() as stage:
            left = begin(stage, call_id="left")
            await stage.started()
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
            lost = begin(stage, call_id="lost")
            await stage.started(2)
            owner = stage.owner()
            owner.engine.round()
            await until(lambda: bool(stage.gateway._choices["lost-0"][1].emitted))
            owner.kill()
            events = await lost
            assert events[-1].event.finish is not None and events[-1].event.finish.reason is FinishReason.ERROR
            assert pending(stage) == 0 and counted(stage) == {}

    run(test)


def test_it_is_off_by_default_and_leaves_no_series() -> None:
    async def test() -> None:
        async with Stage() as stage:
            await finish_one(stage)
            await stage.until_gone()
            assert reruns(stage) == []
            assert b"espalier_audit_total{" not in stage.gateway.metrics_text()
            assert not any(task.get_name() == "exactness audit" for task in asyncio.all_tasks())

    run(test)


def test_results_are_there_from_the_start() -> None:
    """An alert on the increase of a counter does not see one that appears as 1."""

    async def test() -> None:
        async with audit_stage() as stage:
            text = stage.gateway.metrics_text().decode()
            for result in ("equal", "unequal", "failed", "dropped"):
                assert f'espalier_audit_total{{model="fake-model",result="{result}"}} 0.0' in text
            assert 'espalier_audit_pending{model="fake-model"} 0.0' in text

    run(test)


def test_a_drain_does_not_wait_for_it() -> None:
    async def test() -> None:
        async with audit_stage() as stage:
            await finish_one(stage)
            await until(lambda: len(reruns(stage)) == 1)
            running = begin(stage, call_id="running")
            await stage.started(3)
            drain = asyncio.create_task(stage.gateway.drain(10))
            await until(lambda: stage.links[1].engine.aborted == ["audit-call-0"])
            assert not drain.done(), "it waits for the client's request"
            stage.round(4)
            assert ids(await running) == REPLY
            await drain
            assert len(reruns(stage)) == 1, "nothing is audited any more"

    run(test)


def test_it_holds_no_replica_that_is_being_stopped() -> None:
    async def test() -> None:
        async with audit_stage() as stage:
            await finish_one(stage)
            await until(lambda: len(reruns(stage)) == 1)
            stage.gateway.fleet.remove("replica-1")
            await until(lambda: pending(stage) == 0)
            assert counted(stage) == {"dropped": 1}

    run(test)
