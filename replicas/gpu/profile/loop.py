"""Measures the engine's loop on a loaded shard: the scheduler that serves, streams that decode together, and how often the device has nothing to
do. Knows no kernels; capture.py has the profiler.
"""

import queue
import random
import time
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from espalier.replicas.config import EngineConfig
from espalier.replicas.detokenizer import NoText
from espalier.replicas.engine import Engine
from espalier.replicas.errors import EngineError
from espalier.replicas.gpu.group import DeviceShardGroup
from espalier.replicas.gpu.profile.capture import trace_of
from espalier.replicas.gpu.profile.results import LoopProfile, idle_share
from espalier.replicas.gpu.shard import GpuShard
from espalier.replicas.report import RoundReport
from espalier.replicas.request import Request, SamplingParams

TOKENS = 256  # of a timed reply; a profiled one is longer by as much
_WINDOW_ROUNDS = 60
_TIMEOUT_S = 120.0  # for the next round


class _Seen(NamedTuple):
    """A round's report: when it came, and which requests got a token, or their end. error: of one that failed."""

    time: float
    tokens: frozenset[str]
    ended: frozenset[str]
    error: EngineError | None


class LoopBench:
    """An engine on the shard, until `close`."""

    def __init__(self, config: EngineConfig, shard: GpuShard) -> None:
        self._vocab_size = shard.info.vocab_size
        self._rng = random.Random(0)
        self._reports: queue.SimpleQueue[_Seen] = queue.SimpleQueue()
        self._live: set[str] = set()
        self._engine = Engine(config, DeviceShardGroup(shard), NoText())
        self._engine.start(self._sink)

    def _sink(self, report: RoundReport) -> None:
        tokens = frozenset(event.request_id for event in report.events if event.token_ids)
        ended = {event.request_id: event.finish.error for event in report.events if event.finish is not None}
        error = next((error for error in ended.values() if error is not None), None)
        self._reports.put(_Seen(time.perf_counter(), tokens, frozenset(ended), error))

    def measure(self, rows: int, context: int, params: SamplingParams) -> LoopProfile:
        """`rows` streams whose replies have `context` tokens before them half way. Raises the EngineError that ends one."""
        self._begin(rows, context - TOKENS // 2, replace(params, max_tokens=TOKENS))
        together = self._together(rows)
        self._drain()
        self._begin(rows, context - TOKENS, replace(params, max_tokens=2 * TOKENS))
        self._wait_for_all(rows)
        window_s, window_rounds, idle = idle_share(trace_of(self._some_rounds))
        self._drain()
        return LoopProfile(
            rows=rows,
            round_us=median(1e6 * (after - before) for before, after in pairwise(together)),
            window_s=window_s,
            window_rounds=window_rounds,
            idle_share=idle,
        )

    def close(self) -> None:
        """Ends the engine; the shard stays."""
        self._engine.stop()

    def _begin(self, rows: int, prompt_tokens: int, params: SamplingParams) -> None:
        for number in range(rows):
            prompt = tuple(self._rng.randrange(self._vocab_size) for _ in range(prompt_tokens))
            request_id = f"{self._rng.getrandbits(64):x}-{number}"
            self._live.add(request_id)
            self._engine.submit(
                Request(request_id=request_id, prompt_token_ids=prompt, params=params, arrival_time=time.time())
            )

    def _next(self) -> _Seen:
        seen = self._reports.get(timeout=_TIMEOUT_S)
        if seen.error is not None:
            raise seen.error
        self._live -= seen.ended
        return seen

    def _together(self, rows: int) -> list[float]:
        """When the rounds came in which all streams got a token."""
        times = []
        while len(self._live) == rows:
            seen = self._next()
            if len(seen.tokens) == rows:
                times.append(seen.time)
        return times

    def _wait_for_all(self, rows: int) -> None:
        while len(self._live) == rows and len(self._next().tokens) < rows:
            pass

    def _some_rounds(self) -> None:
        for _ in range(_WINDOW_ROUNDS):
            if not self._live:
                return
            self._next()

    def _drain(self) -> None:
        while self._live:
            self._next()
