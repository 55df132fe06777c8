"""Times cases on a CUDA device: calls captured in graphs, replayed in turn, medians. Knows no op.

A graph goes round the copies of the inputs, so that weights come from memory and not from the L2. All replays of a case are enqueued
ahead of the device, so that no launch from the host is in a time. Products that reach the power limit are timed twice: cool, each replay
after a pause, all calls in turn; and hot, each call by itself, after HEAT_S of nothing else: what ran before matters more than most
changes of a kernel.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from espalier.kernels.bench.registry import BenchCase, Call, Inputs, Workload
from espalier.kernels.bench.results import COOL, HOT, STEADY, Limits, Timing

REPLAYS = {STEADY: 15, COOL: 9, HOT: 9}
GRAPH_US = 400.0  # calls of one graph take about so long together, ...
POWER_BOUND_GRAPH_US = 1500.0
MAX_CALLS = 512  # ... unless they are more than this
PAUSE_S = 0.015
HEAT_S = 0.1
COVER_BYTES = 128 << 20  # a copy that keeps the device busy while the host enqueues a replay


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph of `num_calls` calls."""

    graph: torch.cuda.CUDAGraph
    num_calls: int


def measure(
    cases: Iterable[BenchCase], inputs: Inputs, on_failure: Callable[[BenchCase, Exception], None]
) -> Iterator[list[Timing]]:
    """Timings of one case after the other. Cases that share inputs must be neighbours. A case that raises is told and left out."""
    for case in cases:
        inputs.begin(case)
        try:
            yield measure_case(case, inputs)
        except Exception as error:  # one case that fails must not lose the others
            on_failure(case, error)


def measure_case(case: BenchCase, inputs: Inputs) -> list[Timing]:
    """One timing a call and mode."""
    workload = case.make(inputs)
    captured = {name: _capture(call, workload) for name, call in workload.calls.items()}
    modes = (COOL, HOT) if workload.power_bound else (STEADY,)
    timings = []
    for mode in modes:
        for name, times in _replay(captured, mode, inputs.device).items():
            low, median, high = statistics.quantiles(times, n=4)
            spread = (high - low) / 2 / median
            timings.append(
                Timing(
                    op=case.op,
                    labels=dict(case.labels),
                    call=name,
                    mode=mode,
                    us=median,
                    spread=spread,
                    num_bytes=workload.num_bytes,
                    flops=workload.flops,
                )
            )
    return timings


def measure_limits(device: torch.device) -> Limits:
    """Copy bandwidth and the rate of the library's product, as cases like any other."""
    inputs = Inputs(device)

    def copy(inputs: Inputs) -> Workload:
        source = inputs.randn(1 << 29)
        target = torch.empty_like(source)
        # By a kernel: in a graph, a plain copy is left to the copy engine, which is slower.
        return Workload({"copy": Call(lambda _: torch.neg(source, out=target))}, num_bytes=2 * source.nbytes)

    def product(inputs: Inputs) -> Workload:
        a, b, out = inputs.randn(8192, 8192), inputs.randn(8192, 8192), inputs.empty(8192, 8192)
        return Workload(
            {"product": Call(lambda _: torch.mm(a, b, out=out))}, num_bytes=0, flops=2 * 8192**3, power_bound=True
        )

    (copied,) = measure_case(BenchCase("limit", {"of": "copy"}, copy), inputs)
    cool, _ = measure_case(BenchCase("limit", {"of": "product"}, product), inputs)
    return Limits(copy_gb_s=copied.num_bytes / copied.us * 1e-3, product_tflop_s=cool.flops / cool.us * 1e-6)


def _capture(call: Call, workload: Workload) -> Captured:
    for i in range(call.copies):
        call.run(i)  # compiles, and fills the library's workspaces
    if workload.power_bound:
        us = _elapsed_us(_graph(call, 1))
        return _graph(call, max(1, min(round(POWER_BOUND_GRAPH_US / us), MAX_CALLS)))
    once = _graph(call, call.copies)
    rounds = max(1, min(round(GRAPH_US / _elapsed_us(once)), MAX_CALLS // call.copies))
    return once if rounds == 1 else _graph(call, rounds * call.copies)


def _graph(call: Call, num_calls: int) -> Captured:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(num_calls):
            call.run(i % call.copies)
    return Captured(graph, num_calls)


def _elapsed_us(captured: Captured) -> float:
    captured.graph.replay()
    start, end = _event(), _event()
    start.record()
    captured.graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _replay(captured: Mapping[str, Captured], mode: str, device: torch.device) -> dict[str, list[float]]:
    """us of one call, for each replay of each graph."""
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in captured}
    cover = torch.empty(COVER_BYTES, dtype=torch.uint8, device=device)
    half = COVER_BYTES // 2
    for name in _order(captured, mode):
        if mode == COOL:
            torch.cuda.synchronize()
            time.sleep(PAUSE_S)
        if mode == COOL or not spans[name]:
            cover[:half].copy_(cover[half:])
        if mode == HOT and not spans[name]:
            _heat(captured[name])
        start, end = _event(), _event()
        start.record()
        captured[name].graph.replay()
        end.record()
        spans[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: [start.elapsed_time(end) * 1e3 / captured[name].num_calls for start, end in pairs]
        for name, pairs in spans.items()
    }


def _order(names: Iterable[str], mode: str) -> list[str]:
    """Which graph is replayed when: in turn, or each REPLAYS times in a row where it should find its own heat."""
    names, times = list(names), REPLAYS[mode]
    return [name for name in names for _ in range(times)] if mode == HOT else names * times


def _heat(captured: Captured) -> None:
    until = time.monotonic() + HEAT_S
    while time.monotonic() < until:
        captured.graph.replay()
        torch.cuda.synchronize()
    captured.graph.replay()  # the device is busy while the first timed replay is enqueued


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
