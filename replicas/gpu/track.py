"""A track: one CUDA stream with its buffers, its counters and its graphs. It runs rounds one after the other and says what they drew.

Knows rounds as packed inputs; which sequences they are about is the shard's. One thread launches; any thread may wait for results.
"""

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from espalier.kernels.device import device_class
from espalier.kernels.round.updates import apply_updates
from espalier.kernels.sampling.history import observe
from espalier.kernels.sampling.rows import MAX_TOP
from espalier.replicas.gpu.inputs import InputFields, Words
from espalier.replicas.gpu.ranges import OFF, Ranges
from espalier.replicas.gpu.round import REMEMBERED_ROUNDS, Model, RoundBuffers, round_scratch
from espalier.replicas.gpu.rounds import RoundNeed, RoundShape, RoundShapes
from espalier.replicas.streams.counters import CounterPool, PoolFigures

_TIMED_REPLAYS = 3


@dataclass(frozen=True, slots=True)
class LaneInput:
    """Rows of one lane: tokens at positions start, ...; each a token id, or -1 - i for the token at place i of the track's drawn ones.

    samples: whether its last row is sampled from. observes: whether penalties count its tokens.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    samples: bool
    observes: bool


@dataclass(frozen=True, slots=True)
class Observation:
    """Tokens of a slot that are not computed but counted by penalties, from position `start` on."""

    slot: int
    start: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RoundInput:
    """One round. updates: int32 [n, 2], words of the state that change before it. cleared: slots whose history begins anew.

    greedy: whether a greedy graph serves all lanes.
    """

    lanes: Sequence[LaneInput]
    updates: Words
    cleared: Sequence[int] = ()
    observations: Sequence[Observation] = ()
    greedy: bool = False


@dataclass(frozen=True, slots=True)
class Results:
    """What the sampled rows of a round drew, in the order of lanes: lists as in `kernels/sampling/sample.py`'s Drawn."""

    token_ids: list[int]
    status: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


@dataclass(slots=True)
class _Staging:
    """Memory of the host that one round's copies use. copied: after the inputs were read. done: after the results were written."""

    inputs: Tensor
    results: Tensor
    copied: torch.cuda.Event | None
    done: torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class RunningRound:
    """A round that was launched. place: of its first drawn token among the track's drawn ones. room: samples that results have room for."""

    place: int
    num_samples: int
    has_logprobs: bool
    room: int
    staging: _Staging

    def wait(self) -> Results:
        """Waits until it has run. Raises what CUDA says went wrong. To be called before REMEMBERED_ROUNDS more are launched."""
        if self.staging.done is not None:
            self.staging.done.synchronize()
        count, samples = self.num_samples, self.room
        words = self.staging.results.numpy()
        token_ids, status = words[:count].tolist(), words[samples : samples + count].tolist()
        if not self.has_logprobs:
            return Results(token_ids, status, [], [], [])
        logprobs = words[2 * samples : 2 * samples + count].view(np.float32)
        top_ids = words[3 * samples : 3 * samples + samples * MAX_TOP].reshape(samples, MAX_TOP)
        top = words[3 * samples + samples * MAX_TOP :].view(np.float32).reshape(samples, MAX_TOP)
        return Results(token_ids, status, logprobs.tolist(), top_ids[:count].tolist(), top[:count].tolist())


@dataclass(slots=True)
class _Prepared:
    """What there is for one shape. graph: None where rounds are launched one by one."""

    fields: InputFields
    padding: Words
    graph: torch.cuda.CUDAGraph | None = field(default=None)


class Track:
    """Takes its memory when made; `prepare` captures. stream: None on a CPU, where Triton interprets kernels."""

    def __init__(
        self,
        model: Model,
        shapes: RoundShapes,
        block_size: int,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        ranges: Ranges = OFF,
    ) -> None:
        self._model = model
        self.shapes = shapes
        self._device = device
        self._stream = stream
        self._ranges = ranges
        network, kv_dtype = model.network, model.kv.keys[0].dtype
        with self.on_stream():
            self._buffers = RoundBuffers(network.config, shapes, kv_dtype, block_size, device)
            self._pool = CounterPool(device, stream)
            self._pool.reserve(round_scratch(device_class(device), network.config, shapes, model.state.limits))
        self._prepared: dict[RoundShape, _Prepared] = {}
        self._staging = [self._new_staging() for _ in range(REMEMBERED_ROUNDS)]
        self._num_launched = 0
        self.num_captures = 0
        self.num_replays = 0

    @property
    def pool_figures(self) -> PoolFigures:
        """Of its counters."""
        return self._pool.figures

    def prepare(self, *, graphs: bool) -> None:
        """Runs every shape once, with no lanes, so that nothing is compiled later; captures each where `graphs`."""
        with _garbage_kept(), self.on_stream():
            for shape in self.shapes.all():
                fields = InputFields.of(shape, self._buffers.group)
                prepared = self._prepared[shape] = _Prepared(fields, fields.padding())
                self._buffers.inputs[: fields.num_words].copy_(torch.from_numpy(prepared.padding))
                self._buffers.compute(shape, fields, self._model, self._pool)
                if graphs and self._stream is not None:
                    prepared.graph = self._capture(shape, fields)
        if self._stream is not None:
            self._stream.synchronize()

    def _capture(self, shape: RoundShape, fields: InputFields) -> torch.cuda.CUDAGraph:
        self._pool.seal()
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph(): that synchronizes the device at each of many captures.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            self._buffers.compute(shape, fields, self._model, self._pool)
        finally:
            graph.capture_end()
        self.num_captures += 1
        return graph

    def round_ms(self) -> tuple[tuple[int, float], ...]:
        """Milliseconds of a mixed round by its rows, measured with empty lanes, so without attention; () without graphs."""
        measured = []
        for rows in self.shapes.mixed_rows:
            lanes = min(rows, self.shapes.mixed_lanes[-1])
            shape = self.shapes.choose(RoundNeed(rows, lanes, 1, 1, greedy=False))
            graph = self._prepared[shape].graph
            if graph is None or self._stream is None:
                return ()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            with self.on_stream():
                fields = self._prepared[shape].fields
                self._buffers.inputs[: fields.num_words].copy_(torch.from_numpy(self._prepared[shape].padding))
                graph.replay()
                begin.record()
                for _ in range(_TIMED_REPLAYS):
                    graph.replay()
                end.record()
            end.synchronize()
            measured.append((rows, begin.elapsed_time(end) / _TIMED_REPLAYS))
        return tuple(measured)

    def launch(self, given: RoundInput, behind: torch.cuda.Event | None = None) -> RunningRound:
        """Enqueues a round behind those before it, and behind an event of another stream."""
        index = self._num_launched % REMEMBERED_ROUNDS
        self._num_launched += 1
        staging = self._staging[index]
        if staging.copied is not None:
            staging.copied.synchronize()
        place = index * self._buffers.samples
        with self.on_stream():
            if behind is not None:
                behind.wait()
            self._tell_state(given)
            if not given.lanes:
                self._update(given.updates)
                _record(staging.copied)
                _record(staging.done)
                return RunningRound(place, 0, False, 0, staging)
            shape = self.shapes.choose(_need(given))
            prepared = self._prepared[shape]
            fields = prepared.fields
            self._update(given.updates[fields.num_updates :])
            with self._ranges("pack"):
                words = staging.inputs.numpy()[: fields.num_words]
                words[:] = prepared.padding
                num_samples = _pack(words, fields, given, place)
                if shape.mixed:
                    fields.share_out(words)
            self._buffers.inputs[: fields.num_words].copy_(staging.inputs[: fields.num_words], non_blocking=True)
            _record(staging.copied)
            with self._ranges("run"):
                self._run(shape, prepared)
            self.num_replays += prepared.graph is not None
            samples = self._buffers.samples
            has_logprobs = not shape.greedy
            num_words = staging.results.numel() if has_logprobs else 2 * samples
            staging.results[:num_words].copy_(self._buffers.results[:num_words], non_blocking=True)
            _record(staging.done)
        return RunningRound(place, num_samples, has_logprobs, samples, staging)

    def repeat(self, shape: RoundShape, *, eager: bool = False) -> None:
        """Enqueues the kernels of the last round, which had this shape, once more: for measurements. The same is computed and stored again;
        only penalties, where a lane has any, count its tokens once more.

        eager: launch by launch, though there is a graph.
        """
        prepared = self._prepared[shape]
        with self.on_stream():
            self._run(shape, replace(prepared, graph=None) if eager else prepared)

    def _run(self, shape: RoundShape, prepared: _Prepared) -> None:
        if prepared.graph is None:
            self._buffers.compute(shape, prepared.fields, self._model, self._pool)
        else:
            prepared.graph.replay()

    def _tell_state(self, given: RoundInput) -> None:
        """Histories of sequences that begin, and tokens restored for them: rare, so launched one by one."""
        state = self._model.state
        for slot in given.cleared:
            state.seen[slot].zero_()
        if given.observations:
            # Their prompt lengths and slots must be known before they are counted.
            self._update(given.updates)
        for seen in given.observations:
            count = len(seen.token_ids)
            numbers = np.empty((3, count), dtype=np.int32)
            numbers[0], numbers[1], numbers[2] = seen.token_ids, seen.slot, np.arange(seen.start, seen.start + count)
            token_ids, slots, positions = torch.from_numpy(numbers).to(self._device)
            observe(token_ids, slots, positions, state.prompt_lens, state.seen)

    def _update(self, updates: Words) -> None:
        """Writes words of the state ahead of a round that has no room for them."""
        if len(updates):
            apply_updates(torch.from_numpy(updates).to(self._device), self._model.state.words.view(1, -1))

    def recover(self) -> None:
        """After a launch failed: clears counters that it may have left behind. Raises when the device itself has failed."""
        self._pool.check()

    def _new_staging(self) -> _Staging:
        pinned = self._stream is not None
        inputs, results = self._buffers.inputs, self._buffers.results
        return _Staging(
            inputs=torch.zeros(inputs.shape, dtype=inputs.dtype, pin_memory=pinned),
            results=torch.zeros(results.shape, dtype=results.dtype, pin_memory=pinned),
            copied=torch.cuda.Event() if pinned else None,  # type: ignore[no-untyped-call]
            done=torch.cuda.Event(blocking=True) if pinned else None,  # type: ignore[no-untyped-call]
        )

    def on_stream(self) -> contextlib.AbstractContextManager[object]:
        """Makes the track's stream the current one."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


@contextlib.contextmanager
def _garbage_kept() -> Iterator[None]:
    """Python frees no cycles meanwhile: a graph of an engine that has ended may be in one, and destroying it breaks a capture under way
    (PyTorch pull request 161037).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _record(event: torch.cuda.Event | None) -> None:
    if event is not None:
        event.record()


def _need(given: RoundInput) -> RoundNeed:
    lanes = given.lanes
    return RoundNeed(
        num_rows=sum(len(lane.tokens) for lane in lanes),
        num_lanes=len(lanes),
        num_samples=sum(lane.samples for lane in lanes),
        context=max(lane.start + len(lane.tokens) for lane in lanes),
        greedy=given.greedy,
    )


def _pack(words: Words, fields: InputFields, given: RoundInput, place: int) -> int:
    """Fills a padded buffer with a round; returns how many rows are sampled from."""
    row_lane, tokens = fields.host(words, "row_lane"), fields.host(words, "given")
    slots, first_rows = fields.host(words, "lane_slot"), fields.host(words, "first_row")
    num_rows, starts = fields.host(words, "num_rows"), fields.host(words, "start")
    observes, sampled = fields.host(words, "observes"), fields.host(words, "sampled_rows")
    fields.host(words, "place")[0] = place
    updates = given.updates[: fields.num_updates]
    fields.host(words, "updates").reshape(-1, 2)[: len(updates)] = updates
    row = num_samples = 0
    for index, lane in enumerate(given.lanes):
        end = row + len(lane.tokens)
        row_lane[row:end] = index
        tokens[row:end] = lane.tokens
        slots[index], first_rows[index], num_rows[index] = lane.slot, row, end - row
        starts[index], observes[index] = lane.start, lane.observes
        if lane.samples:
            sampled[num_samples] = end - 1
            num_samples += 1
        row = end
    return num_samples
