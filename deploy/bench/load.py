"""Runs a bench: every prompt alone, then levels of N streams released from a barrier. Decides nothing about figures; stats.py does."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from espalier.deploy.bench.client import chat_body, stream_chat
from espalier.deploy.bench.prompts import BenchPrompt
from espalier.deploy.bench.stats import LevelSummary, StreamRecord, summarise
from espalier.replicas.errors import EngineError, InvalidRequestError

CPU_SAMPLE = "process_cpu_seconds_total"
# A stream's first chunk is one line with all of the prompt's ids.
MAX_LINE_BYTES = 2**20


class BenchError(EngineError):
    """The cluster could not be measured."""

    code = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What to run. url: the cluster's HTTP address. model: None takes the one model served there. levels: numbers of concurrent streams.

    num_tokens: tokens of each reply. seeded: sample with a fixed seed, else greedy. reps: times that each level runs.
    """

    url: str
    model: str | None
    api_key: str | None
    levels: tuple[int, ...]
    num_tokens: int
    seeded: bool
    reps: int
    prompts: tuple[BenchPrompt, ...]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """model: the one measured. solo: each prompt's run alone. levels: in the order of the plan. failures: what failed streams said."""

    model: str
    solo: tuple[StreamRecord, ...]
    levels: tuple[LevelSummary, ...]
    failures: tuple[str, ...]


async def run_bench(plan: BenchPlan, progress: Callable[[str], None]) -> BenchResult:
    """Runs the whole plan. Raises BenchError when the cluster does not answer or a prompt fails even alone."""
    headers = {"Authorization": f"Bearer {plan.api_key}"} if plan.api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=300)
    async with aiohttp.ClientSession(
        headers=headers, connector=connector, timeout=timeout, read_bufsize=MAX_LINE_BYTES
    ) as session:
        model = plan.model or await _only_model(session, plan.url)
        bodies = [chat_body(model, prompt, plan.num_tokens, seeded=plan.seeded) for prompt in plan.prompts]
        jobs = list(zip(plan.prompts, bodies, strict=True))
        progress(f"{len(jobs)} prompts alone")
        solo = [await stream_chat(session, plan.url, prompt, body) for prompt, body in jobs]
        for record in solo:
            if record.error is not None:
                raise BenchError(f"prompt {record.prompt} fails when run alone: {record.error}")
        hashes = {record.prompt: record.token_sha256 or "" for record in solo}
        levels: list[LevelSummary] = []
        failures: list[str] = []
        for level in plan.levels:
            progress(f"{level} streams, {plan.reps} times")
            before = await gateway_cpu_s(session, plan.url)
            batches = [await _run_batch(session, plan.url, jobs, level, rep) for rep in range(plan.reps)]
            after = await gateway_cpu_s(session, plan.url)
            spent = after - before if after is not None and before is not None else None
            levels.append(summarise(level, batches, hashes, spent))
            failures += [record.error for batch in batches for record in batch if record.error is not None]
    return BenchResult(model, tuple(solo), tuple(levels), tuple(failures))


async def _run_batch(
    session: aiohttp.ClientSession, url: str, jobs: list[tuple[BenchPrompt, dict[str, Any]]], level: int, rep: int
) -> list[StreamRecord]:
    """`level` streams at once; later repetitions start at another prompt, so that small levels see them all."""
    barrier = asyncio.Barrier(level)

    async def one(index: int) -> StreamRecord:
        prompt, body = jobs[(rep * level + index) % len(jobs)]
        await barrier.wait()
        return await stream_chat(session, url, prompt, body)

    return list(await asyncio.gather(*(one(index) for index in range(level))))


async def _only_model(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(f"{url}/v1/models") as response:
            if response.status != 200:
                raise BenchError(f"{url}/v1/models answers {response.status}: {(await response.text())[:300]}")
            names = [str(entry["id"]) for entry in (await response.json())["data"]]
    except (aiohttp.ClientError, TimeoutError) as error:
        raise BenchError(f"{url} does not answer: {error}") from None
    if len(names) != 1:
        raise InvalidRequestError(f"{url} serves {', '.join(names) or 'no model'}; choose with --model", param="model")
    return names[0]


async def gateway_cpu_s(session: aiohttp.ClientSession, url: str) -> float | None:
    """CPU seconds of the gateway's process so far, from /metrics; None when it does not tell, or not to us."""
    try:
        async with session.get(f"{url}/metrics") as response:
            if response.status != 200:
                return None
            text = await response.text()
    except (aiohttp.ClientError, TimeoutError):
        return None
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    values = [sample.value for sample in samples if sample.name == CPU_SAMPLE]
    return sum(values) if values else None
