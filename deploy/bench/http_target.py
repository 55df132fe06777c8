"""A server of OpenAI's API as a bench target, over HTTP. An Espalier is asked for token ids and hashes; of any other only speed is known.

Connections live on an event loop of their own thread; calls given together are all sent in one turn of it.
"""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from espalier.deploy.bench.client import stream_reply
from espalier.deploy.bench.prompts import BenchPrompt
from espalier.deploy.bench.stats import StreamRecord
from espalier.deploy.bench.target import BenchError, Call, TargetInfo, TargetState
from espalier.deploy.bench.wire import CHAT_ROUTE, common_body, espalier_body, route_of
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.request import SamplingParams

T = TypeVar("T")
# Replicas tell their figures once a second, on a stream that may wait for as long.
METRICS_LAG_S = 3.0
# A stream's first chunk is one line with all of the prompt's ids.
MAX_LINE_BYTES = 2**20
_PROBE = Call(
    prompt=BenchPrompt("probe", "probe", ({"role": "user", "content": "Hello"},)),
    params=SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True),
)
COUNTED = {
    "rounds": "espalier_rounds_total",
    "preemptions": "espalier_num_preemptions_total",
    "graph_captures": "espalier_engine_graph_captures_total",
    "graph_replays": "espalier_engine_graph_replays_total",
    "pool_growths": "espalier_engine_pool_growths_total",
    "poison_resets": "espalier_engine_pool_resets_total",
}


class HttpTarget:
    """The server at `url`. model: None takes the one model served there. Raises BenchError when it does not answer."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bench-http", daemon=True)
        self._thread.start()
        self._session = self._run(_open_session(api_key))
        self._knows_ignore_eos = True
        try:
            self.info = self._run(self._describe(model))
            if not self.info.is_exact:
                self._knows_ignore_eos = self._run(self._probe())
        except BaseException:
            self.close()
            raise

    def submit(self, calls: Sequence[Call]) -> list[Future[StreamRecord]]:
        """Sends all of them in one turn of the loop."""
        futures: list[Future[StreamRecord]] = [Future() for _ in calls]
        self._loop.call_soon_threadsafe(self._start, list(zip(calls, futures, strict=True)))
        return futures

    def _start(self, jobs: list[tuple[Call, Future[StreamRecord]]]) -> None:
        for call, future in jobs:
            task = self._loop.create_task(self._stream(call))
            task.add_done_callback(partial(_hand_over, future))

    def _stream(self, call: Call) -> Coroutine[Any, Any, StreamRecord]:
        info = self.info
        body = (
            espalier_body(info.model, call)
            if info.is_exact
            else common_body(info.model, call, ignore_eos=self._knows_ignore_eos)
        )
        return stream_reply(
            self._session,
            f"{self._url}{route_of(call)}",
            call.prompt.name,
            body,
            is_exact=info.is_exact,
            leave_after=call.leave_after,
        )

    def token_ids(self, prompt: BenchPrompt) -> tuple[int, ...]:
        """The server's own answer, from /tokenize."""
        return prompt.token_ids or self._run(self._tokenize(prompt))

    def state(self) -> TargetState:
        """From /metrics, all replicas together; empty when it does not tell, or not to us."""
        return self._run(self._scrape())

    def close(self) -> None:
        """Ends all connections."""
        self._run(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _describe(self, wanted: str | None) -> TargetInfo:
        entries = {str(entry["id"]): entry for entry in (await self._json("GET", "/v1/models"))["data"]}
        if wanted is None and len(entries) != 1:
            names = ", ".join(entries) or "no model"
            raise InvalidRequestError(f"{self._url} serves {names}; choose with --model", param="model")
        model = wanted or next(iter(entries))
        if model not in entries:
            raise InvalidRequestError(f"--model: {self._url} serves {', '.join(entries)}, not {model}", param="model")
        entry = entries[model]
        own: dict[str, Any] = entry.get("espalier") or {}
        return TargetInfo(
            where=self._url,
            model=model,
            lag_s=METRICS_LAG_S,
            max_context=entry.get("max_model_len"),
            vocab_size=own.get("vocab_size"),
            numerics_id=own.get("numerics_id"),
            quantization=own.get("quantization"),
            is_exact=entry.get("owned_by") == "espalier",
        )

    async def _probe(self) -> bool:
        """Whether the server takes `ignore_eos`: those that do not refuse it by status, or pass over it."""
        body = common_body(self.info.model, _PROBE, ignore_eos=True)
        async with self._session.post(f"{self._url}{CHAT_ROUTE}", json=body) as response:
            return response.status not in (400, 422)

    async def _tokenize(self, prompt: BenchPrompt) -> tuple[int, ...]:
        body = {"model": self.info.model, "messages": list(prompt.messages)}
        return tuple((await self._json("POST", "/tokenize", body))["tokens"])

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            async with self._session.request(method, f"{self._url}{path}", json=body) as response:
                if response.status != 200:
                    raise BenchError(f"{self._url}{path} answers {response.status}: {(await response.text())[:300]}")
                return await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise BenchError(f"{self._url} does not answer: {error}") from None

    async def _scrape(self) -> TargetState:
        try:
            async with self._session.get(f"{self._url}/metrics") as response:
                text = await response.text() if response.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError):
            text = ""
        return state_of(text)


def state_of(metrics: str) -> TargetState:
    """What Prometheus text says of a target's state."""
    values: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            values.setdefault(sample.name, []).append(sample.value)
    found = [
        values[name] for name in ("espalier_num_requests_running", "espalier_num_requests_waiting") if name in values
    ]
    held = values.get("espalier_kv_cache_usage_perc")
    device = values.get("espalier_engine_device_memory_reserved_bytes")
    host = values.get("process_resident_memory_bytes")
    cpu_s = values.get("process_cpu_seconds_total")
    return TargetState(
        num_live=int(sum(map(sum, found))) if found else None,
        held_share=max(held) if held else None,
        device_bytes=int(sum(device)) if device else None,
        host_bytes=int(sum(host)) if host else None,
        cpu_s=sum(cpu_s) if cpu_s else None,
        counts={name: int(sum(values[sample])) for name, sample in COUNTED.items() if sample in values},
    )


async def _open_session(api_key: str | None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=300),
        read_bufsize=MAX_LINE_BYTES,
    )


def _hand_over(future: Future[StreamRecord], task: "asyncio.Task[StreamRecord]") -> None:
    error = task.exception()
    if error is None:
        future.set_result(task.result())
    else:
        future.set_exception(error)
