"""A load under which every panel of the boards has something to show: all roads, shared prefixes, sessions, bursts, and clients that err or leave."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx

from tests.support.cluster_clients import GRPC, HTTP_STREAMED, HTTP_WHOLE, Ask, Roads

MODEL = "tiny"
DOCUMENTS = tuple(f"Document {i}. " + f"The sea has many shores, and this is number {i}. " * 4 for i in range(4))


def served_options(checkpoint: Path, cache: Path, num_replicas: int = 2) -> dict[str, Any]:
    """A cluster with little room: KV blocks for some of its lanes only, and short queues."""
    return {
        "model": str(checkpoint),
        "name": MODEL,
        "replicas": num_replicas,
        "cpus": 0.5,
        "cpu_threads": 1,
        "context": 512,
        "kv_tokens": 1024,
        "max_lanes": 8,
        "batch_tokens": 64,
        "max_waiting": 16,
        "cache_dir": str(cache),
        "audit_share": 0.5,
    }


@dataclass(frozen=True, slots=True)
class Phase:
    """So many clients ask one thing after the other for so long. pause_s: the mean time that each waits in between."""

    seconds: float
    clients: int
    pause_s: float = 0.0


async def play(http_url: str, grpc_address: str, phases: Sequence[Phase], seed: int = 0) -> None:
    """Run the phases one after the other; each opens with a burst that fills the queues. Failures of requests are part of the play."""
    async with Roads(http_url, grpc_address, MODEL) as roads:
        for number, phase in enumerate(phases):
            pick = random.Random(seed * 1000 + number)
            until = asyncio.get_running_loop().time() + phase.seconds
            burst = [_ask(pick, max_tokens=16) for _ in range(8 * phase.clients)]
            clients = [_client(roads, phase, until, random.Random(pick.random())) for _ in range(phase.clients)]
            await asyncio.gather(roads.together(burst, GRPC), *clients)


async def _client(roads: Roads, phase: Phase, until: float, pick: random.Random) -> None:
    while asyncio.get_running_loop().time() < until:
        [act] = pick.choices(ACTS, weights=[act.weight for act in ACTS])
        # A replica may be killed meanwhile, and refusals are wanted.
        with suppress(httpx.HTTPError, grpc.aio.AioRpcError):
            await act.run(roads, pick)
        if phase.pause_s:
            await asyncio.sleep(pick.expovariate(1 / phase.pause_s))


def _ask(pick: random.Random, max_tokens: int | None = None) -> Ask:
    return Ask(
        content=pick.choice(DOCUMENTS) + f"Question {pick.randrange(1000)}?",
        temperature=pick.choice((0.0, 0.8)),
        seed=pick.randrange(2**32),
        max_tokens=max_tokens or pick.choice((16, 32, 64, 128)),
    )


async def _over_http(roads: Roads, pick: random.Random) -> None:
    await HTTP_WHOLE(roads, _ask(pick))


async def _streamed(roads: Roads, pick: random.Random) -> None:
    await HTTP_STREAMED(roads, _ask(pick))


async def _over_grpc(roads: Roads, pick: random.Random) -> None:
    await GRPC(roads, _ask(pick))


async def _in_a_session(roads: Roads, pick: random.Random) -> None:
    await _complete(roads, prompt=f"Once {pick.random()}", max_tokens=12, session_id=f"session {pick.randrange(4)}")


async def _until_a_stop(roads: Roads, pick: random.Random) -> None:
    await _complete(roads, prompt=f"Twice {pick.random()}", max_tokens=64, temperature=1, stop=["e"])


async def _in_vain(roads: Roads, pick: random.Random) -> None:
    """Requests that are wrong: an unknown route, an unknown model, a bad field."""
    await roads.http.get("/nowhere")
    await roads.http.post("/v1/completions", json={"model": "absent", "prompt": "x"})
    await _complete(roads, prompt="x", max_tokens=-pick.randrange(1, 9))


async def _leave_http(roads: Roads, pick: random.Random) -> None:
    async with aclosing(roads.http_events(_ask(pick, max_tokens=200))) as events:
        for _ in range(pick.randrange(1, 9)):
            await anext(events, None)


async def _leave_grpc(roads: Roads, pick: random.Random) -> None:
    call = roads.grpc_call(_ask(pick, max_tokens=200))
    for _ in range(pick.randrange(1, 9)):
        await call.read()
    call.cancel()


async def _complete(roads: Roads, **fields: object) -> None:
    await roads.http.post("/v1/completions", json={"model": roads.model, **fields})


@dataclass(frozen=True, slots=True)
class Act:
    """What a client may do next, and how often beside the others."""

    run: Callable[[Roads, random.Random], Awaitable[None]]
    weight: int


ACTS = (
    Act(_over_http, 6),
    Act(_streamed, 8),
    Act(_over_grpc, 8),
    Act(_in_a_session, 6),
    Act(_until_a_stop, 4),
    Act(_in_vain, 1),
    Act(_leave_http, 2),
    Act(_leave_grpc, 2),
)
