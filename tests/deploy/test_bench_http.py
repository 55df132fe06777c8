"""The bench over HTTP on a whole gateway and a real engine loop: token ids as prompts, resumed replies, clients that leave, figures from /metrics."""

import asyncio
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import uvicorn

from espalier.cluster.config import ClusterConfig, GatewayConfig
from espalier.cluster.gateway import Gateway
from espalier.cluster.ingress.http import build_http_app
from espalier.cluster.metrics import ClusterMetrics
from espalier.cluster.replica import EngineReplica
from espalier.deploy.bench.http_target import HttpTarget
from espalier.deploy.bench.load import run_bench
from espalier.deploy.bench.plan import BenchPlan
from espalier.deploy.bench.prompts import random_prompts
from espalier.deploy.bench.soak import SoakPlan, run_soak
from espalier.replicas.engine import Engine
from espalier.replicas.group import LocalShardGroup
from tests.support import fake_engine
from tests.support.fake_shard import FakeShard, FakeText, fake_config
from tests.support.local_link import MODEL, LocalLink, until

# Room for kept states beside the longest prompts.
INFO = replace(fake_engine.INFO, num_blocks=512)


class _Cluster:
    """A gateway with one replica, served on a loop of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.shard = FakeShard(INFO)
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    async def start(self, listener: socket.socket) -> None:
        config = ClusterConfig(models=(MODEL,), gateway=GatewayConfig())
        self.gateway = Gateway(config, {MODEL.name: fake_engine.load_fake_text(MODEL)}, ClusterMetrics(version="0"))
        self.engine = Engine(fake_config(batch_tokens=256), LocalShardGroup(self.shard), FakeText())
        replica = EngineReplica(MODEL, None, lambda _: (self.engine, INFO))
        self.gateway.fleet.add(MODEL.name, LocalLink("replica-0", replica))
        app = build_http_app(self.gateway, config.gateway)
        self.server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none")
        )
        self._serving = asyncio.create_task(self.server.serve(sockets=[listener]))
        await until(lambda: len(self.gateway.fleet.ready(MODEL.name)) == 1 and self.server.started)

    async def stop(self) -> None:
        self.server.should_exit = True
        await self._serving
        await self.gateway.fleet.close()
        self.engine.stop()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@contextmanager
def cluster() -> Iterator[HttpTarget]:
    """A target on the whole of it."""
    stage = _Cluster()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run_coroutine_threadsafe(stage.start(listener), stage.loop).result(20)
        try:
            target = HttpTarget(f"http://127.0.0.1:{listener.getsockname()[1]}")
            try:
                yield target
            finally:
                target.close()
        finally:
            asyncio.run_coroutine_threadsafe(stage.stop(), stage.loop).result(20)
            stage.close()
    assert stage.shard.violations == []


def test_cells_resumed_replies_and_long_prompts() -> None:
    with cluster() as target:
        plan = BenchPlan(
            prompts=random_prompts(3, [30], INFO.vocab_size, random.Random(0)),
            samplings=("greedy", "seeded"),
            levels=(4,),
            num_tokens=12,
            reps=1,
            serial=True,
            fresh=True,
            prefill=(100,),
        )
        result = run_bench(plan, [target], lambda line: None)
    assert result.is_clean, result.notes
    assert result.targets[0].numerics_id == INFO.numerics_id
    assert {row.streams: row.comparison.equal for row in result.rows} == {"alone": 0, "serial": 3, "4": 4}
    tails = {fresh.prompt_tokens - fresh.kept_tokens for fresh in result.fresh}
    assert tails == {16, 1}
    assert result.prefill[0].tokens_per_s is not None


def test_a_soak_with_clients_that_leave() -> None:
    with cluster() as target:
        plan = SoakPlan(seconds=1.0, abort_share=0.4, streams=8, distinct=10, seed=1)
        result = run_soak(plan, target, lambda line: None)
    assert result.is_clean, (result.comparison.notes, result.leaks)
    assert result.aborted > 0
    assert result.comparison.equal == result.requests
    assert (result.end.num_live, result.end.held_share) == (0, 0.0)
    assert result.end.counts["rounds"] > result.start.counts["rounds"] > 0
