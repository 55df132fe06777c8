"""Measures rounds of a loaded shard: by CUDA events, by the host's clock, and by torch's profiler (CUPTI). Effects alone; results.py
makes figures of what it brings. Wants the shard idle, and leaves it so.
"""

import itertools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch

from espalier.replicas.gpu.profile.results import RoundProfile, parts_of
from espalier.replicas.gpu.profile.timeline import Work, work_of
from espalier.replicas.gpu.rounds import RoundNeed, RoundShape
from espalier.replicas.gpu.shard import GpuShard, LaunchedStep
from espalier.replicas.gpu.state import is_greedy
from espalier.replicas.gpu.track import Track
from espalier.replicas.request import SamplingParams
from espalier.replicas.schedule.step import BlockAppend, Lane, SequenceBegin, Step
from espalier.replicas.schedule.tracks import MAIN

_WARM_ROUNDS = 5
_PROFILED_ROUNDS = 20
# No engine counts its steps so.
_STEP_IDS = itertools.count(-1, -1)


def profile_decode(
    shard: GpuShard, rows: int, context: int, params: SamplingParams, *, repeats: int, eager: bool
) -> RoundProfile:
    """Decode rounds of `rows` sequences that have context - 1 tokens of keys and values. The profiler sees graphs, unless `eager`.

    A graph in which it sees no kernels is shown to it launch by launch.
    """
    sequences = _Sequences(shard, rows, 1, context, params)
    need = RoundNeed(rows, rows, rows, context, greedy=is_greedy(params))
    return _profile(shard, sequences, need, repeats=repeats, eager=eager)


def profile_prompt(
    shard: GpuShard, rows: int, context: int, params: SamplingParams, *, repeats: int, eager: bool
) -> RoundProfile:
    """The same of rounds that compute the last `rows` tokens of a prompt of `context` tokens, with nothing beside them."""
    sequences = _Sequences(shard, 1, rows, context, params)
    need = RoundNeed(rows, 1, 1, context, greedy=is_greedy(params))
    return _profile(shard, sequences, need, repeats=repeats, eager=eager)


def _profile(shard: GpuShard, sequences: "_Sequences", need: RoundNeed, *, repeats: int, eager: bool) -> RoundProfile:
    track = shard.tracks[MAIN]
    shape = track.shapes.choose(need)
    for _ in range(_WARM_ROUNDS):
        shard.execute(sequences.step())
    host = _host_times(shard, sequences, repeats)
    chained = _chained_times(shard, sequences, repeats)
    walls = _walls(track, shape, repeats)
    parts = None if eager else parts_of(trace_of(lambda: _repeat(track, shape, eager=False)))
    source = "graph" if parts is not None else "eager"
    if parts is None:
        parts = parts_of(trace_of(lambda: _repeat(track, shape, eager=True)))
    sequences.end()
    low, _, high = quantiles(walls, n=4)
    return RoundProfile(
        rows=need.num_rows,
        context=need.context,
        is_prompt=need.mixed,
        source=source,
        wall_us=median(walls),
        wall_quartiles=(low, high),
        host_us=median(host),
        chained_us=median(chained),
        parts=parts,
    )


def trace_of(work: Callable[[], object]) -> list[Work]:
    """What the device did while `work` ran, until it was done."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return work_of(json.loads(file.read_text(encoding="utf-8"), strict=False))


class _Sequences:
    """Sequences with computed prompts, and steps that compute the last `rows` of `context` positions of each again and again."""

    def __init__(self, shard: GpuShard, count: int, rows: int, context: int, params: SamplingParams) -> None:
        self._shard = shard
        size, vocab = shard.info.block_size, shard.info.vocab_size
        num_blocks = -(-context // size)
        assert count * num_blocks <= shard.info.num_blocks, "a cache that does not hold these sequences"
        self._ids = range(count)
        kept = context - rows
        chunk = shard.tracks[MAIN].shapes.mixed_rows[-1]
        for seq_id in self._ids:
            prompt = [_token(seq_id, place, vocab) for place in range(kept)]
            blocks = tuple(range(seq_id * num_blocks, (seq_id + 1) * num_blocks))
            begins, appends = (SequenceBegin(seq_id, params, kept),), (BlockAppend(seq_id, blocks),)
            shard.execute(Step(next(_STEP_IDS), MAIN, (), begins=begins, appends=appends))
            for start in range(0, kept, chunk):
                lane = Lane(seq_id, start, tuple(prompt[start : start + chunk]), 0)
                shard.execute(Step(next(_STEP_IDS), MAIN, (lane,)))
        self._lanes = tuple(
            Lane(seq_id, kept, tuple(_token(seq_id, place, vocab) for place in range(kept, context)), 1)
            for seq_id in self._ids
        )

    def step(self) -> Step:
        return Step(next(_STEP_IDS), MAIN, self._lanes)

    def end(self) -> None:
        self._shard.execute(Step(next(_STEP_IDS), MAIN, (), ends=tuple(self._ids)))


def _token(seq_id: int, place: int, vocab: int) -> int:
    return (1 + 7919 * seq_id + 104_729 * place) % vocab


def _host_times(shard: GpuShard, sequences: _Sequences, repeats: int) -> list[float]:
    """us to plan, pack and launch a round while the device is idle."""
    times = []
    for _ in range(repeats):
        step = sequences.step()
        begin = time.perf_counter()
        launched = shard.launch(step)
        times.append((time.perf_counter() - begin) * 1e6)
        shard.finish(launched)
    return times


def _chained_times(shard: GpuShard, sequences: _Sequences, repeats: int) -> list[float]:
    """us between results of rounds, two in flight."""
    ahead: LaunchedStep = shard.launch(sequences.step())
    times, before = [], 0.0
    for number in range(repeats + 1):
        following = shard.launch(sequences.step())
        shard.finish(ahead)
        now = time.perf_counter()
        if number:
            times.append((now - before) * 1e6)
        ahead, before = following, now
    shard.finish(ahead)
    return times


def _walls(track: Track, shape: RoundShape, repeats: int) -> list[float]:
    """us of each of the kernels' rounds back to back, enqueued ahead of the device."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    with track.on_stream():
        track.repeat(shape)
        for event in events[:-1]:
            event.record()
            track.repeat(shape)
        events[-1].record()
    events[-1].synchronize()
    return [1e3 * begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]


def _repeat(track: Track, shape: RoundShape, *, eager: bool) -> None:
    for _ in range(_PROFILED_ROUNDS):
        track.repeat(shape, eager=eager)
