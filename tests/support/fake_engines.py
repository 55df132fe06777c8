"""Engines over a fake shard: made, held up, and held to what their requests give alone."""

import threading

from espalier.replicas.engine import Engine
from espalier.replicas.group import LocalShardGroup
from espalier.replicas.schedule.step import Step
from tests.support.engine_runs import TIMEOUT_S, EngineRun
from tests.support.fake_shard import FakeShard, FakeText, fake_config, solo_tokens
from tests.support.waiting import wait_until


class Gate:
    """Holds the shard before each step while closed."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.waiting = threading.Event()

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def __call__(self, step: Step) -> None:
        if not self._open.is_set():
            self.waiting.set()
            assert self._open.wait(TIMEOUT_S)


def make_engine(
    shard: FakeShard,
    *,
    text: FakeText | None = None,
    max_lanes: int = 16,
    max_waiting: int = 256,
    depth: int = 2,
    progress_timeout_s: float = 10.0,
) -> Engine:
    config = fake_config(
        max_lanes=max_lanes,
        max_waiting=max_waiting,
        max_steps_in_flight=depth,
        progress_timeout_s=progress_timeout_s,
    )
    return Engine(config, LocalShardGroup(shard), text or FakeText())


def assert_exact(run: EngineRun, shard: FakeShard, *request_ids: str) -> None:
    for request_id in request_ids or run.answers:
        answer = run.answers[request_id]
        solo = solo_tokens(answer.request, shard.info)
        assert (*answer.request.emitted_token_ids, *answer.token_ids) == solo, request_id
        assert answer.finish is not None and answer.finish.error is None
    assert shard.violations == []


def assert_all_free(engine: Engine) -> None:
    wait_until(lambda: engine.load().free_blocks == engine.load().total_blocks, "all blocks are free", poll_s=0.001)
    load = engine.load()
    assert (load.running, load.waiting, load.outstanding_tokens) == (0, 0, 0)
