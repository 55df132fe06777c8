"""The shard of a model on one GPU: loads it, captures its rounds, and runs steps on its tracks. The counterpart of `replicas/shard.py`.

Steps are launched in the order in which they come and run while the host plans the next; a step's result is waited for elsewhere. Knows no
requests and no text.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch

from espalier.kernels.device import ARITHMETICS, device_class, triton_version
from espalier.replicas.cache.host_copies import HostCopies, blocks_view, staging_bytes
from espalier.replicas.cache.host_memory import plan_host_slots
from espalier.replicas.cache.storage import kv_bytes_per_token
from espalier.replicas.config import EngineConfig, ResolvedConfig, resolved
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.gpu.free_memory import settled_memory
from espalier.replicas.gpu.group import DeviceShardGroup
from espalier.replicas.gpu.kv import DeviceKV
from espalier.replicas.gpu.load import load_network
from espalier.replicas.gpu.memory import plan_device_memory
from espalier.replicas.gpu.ranges import Ranges
from espalier.replicas.gpu.round import Model, buffer_bytes, round_scratch
from espalier.replicas.gpu.rounds import RoundShapes
from espalier.replicas.gpu.sequences import LiveSequences, PlannedRound
from espalier.replicas.gpu.state import SlotState, sampling_limits, state_words
from espalier.replicas.gpu.track import Results, RunningRound, Track
from espalier.replicas.gpu.warm_up import Rounds, WarmUp
from espalier.replicas.model.canary import check_canary
from espalier.replicas.model.checkpoint import open_checkpoint
from espalier.replicas.model.fingerprint import check_record, fingerprint
from espalier.replicas.request import TokenLogprobs
from espalier.replicas.schedule.step import SampledToken, Step, StepCommit, StepResult
from espalier.replicas.schedule.tracks import DECODE, MAIN, PROMPT
from espalier.replicas.shard import quantization
from espalier.replicas.shard_info import ShardInfo
from espalier.replicas.stats import DeviceFigures

# Raised whenever the arithmetic of a row changes in a way that the kernels' own names do not tell.
ARITHMETIC_VERSION = 1
_KV_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# Where Triton interprets kernels, models are tiny.
_INTERPRETER_BYTES = 1 << 30
# Launches of a round, and what a captured one takes of the device's memory at most.
_LAUNCHES_A_LAYER = 12
_OTHER_LAUNCHES = 16
_BYTES_A_LAUNCH = 8192

logger = logging.getLogger(__name__)


class LaunchedStep(NamedTuple):
    """A step on its way."""

    step: Step
    planned: PlannedRound
    running: RunningRound


class GpuShard:
    """Raises CheckpointError, InvalidRequestError (an option, with numbers where memory is short) or EngineError.

    device: "cpu" is for machines where Triton interprets kernels; it is slow, and its arithmetic has an id of its own.
    """

    def __init__(self, options: EngineConfig, device: torch.device | None = None) -> None:
        config = resolved(options)
        device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
        self.device = device
        kind = device_class(device)
        if not kind.triton:
            raise InvalidRequestError(f"device: {device} cannot run the kernels, see `espalier check`", param="device")
        started = time.monotonic()
        cache_dir = config.cache_dir.expanduser()
        checkpoint = open_checkpoint(config.model_path.expanduser())
        model = checkpoint.config
        kv_dtype = _KV_DTYPES[config.kv_dtype]
        limits = sampling_limits(model.vocab_size, len(model.eos_token_ids))
        free_bytes, total_bytes = settled_memory(lambda: _memory(device), config.memory_share)
        # The longest context follows from the plan; what does not depend on it is counted for the longest there could be.
        longest = config.max_context or model.max_positions
        by_track = _track_shapes(config, longest)
        scratch_words = sum(
            sum(dataclasses.astuple(round_scratch(kind, model, shapes, limits))) for shapes in by_track.values()
        )
        max_blocks = -(-longest // config.block_size)
        block_bytes = config.block_size * kv_bytes_per_token(model, config.kv_dtype)
        num_host_slots = plan_host_slots(config, block_bytes)
        plan = plan_device_memory(
            config,
            checkpoint,
            total_bytes=total_bytes,
            free_bytes=free_bytes,
            workspace_bytes=sum(buffer_bytes(model, shapes, kv_dtype) for shapes in by_track.values())
            + 4 * (scratch_words + state_words(config.max_lanes, max_blocks, limits))
            + staging_bytes(block_bytes, num_host_slots),
            graphs_bytes=_graphs_bytes(config, model.num_layers, by_track),
        )
        by_track = _track_shapes(config, plan.max_context)
        rounds = Rounds(
            checkpoint.path,
            tuple(by_track.values()),
            config.max_lanes,
            config.block_size,
            kv_dtype,
            plan.max_context,
            kind,
        )
        warm_up = WarmUp.begin(rounds, checkpoint)
        identity = fingerprint(checkpoint)
        check_record(checkpoint, identity, cache_dir)
        network = load_network(checkpoint, device, plan.max_context)
        loaded = time.monotonic()
        kv = DeviceKV(model, plan.num_blocks, config.block_size, kv_dtype, device)
        max_blocks = -(-plan.max_context // config.block_size)
        state = SlotState(config.max_lanes, max_blocks, limits, device)
        self._model = Model(network, kv, state)
        self._host = HostCopies(blocks_view(kv.storage), num_host_slots, kv.zero_block) if num_host_slots else None
        self._sequences = LiveSequences(state, config.max_lanes, model.eos_token_ids)
        self._ranges = Ranges(enabled=config.nvtx)
        self._tracks = {
            name: Track(self._model, shapes, config.block_size, device, _stream(device, name), self._ranges)
            for name, shapes in by_track.items()
        }
        warm_up.wait()
        for track in self._tracks.values():
            track.prepare(graphs=config.cuda_graphs)
        warm_up.remember()
        logger.info(
            "%s: weights loaded in %.1f s, %d graphs captured in %.1f s",
            checkpoint.path,
            loaded - started,
            sum(track.num_captures for track in self._tracks.values()),
            time.monotonic() - loaded,
        )
        prompts = self._tracks.get(PROMPT) or self._tracks[MAIN]
        self.info = ShardInfo(
            num_blocks=plan.num_blocks,
            block_size=config.block_size,
            max_context=plan.max_context,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            weights_id=identity.weights_id,
            numerics_id=gpu_numerics_id(device, config.kv_dtype),
            quantization=quantization(checkpoint),
            num_host_slots=num_host_slots,
            round_ms=prompts.round_ms(),
        )

    def launch(self, step: Step) -> LaunchedStep:
        """Takes over a step's changes and enqueues its copies and rows. Raises when that failed; then no row of it has a token."""
        if self._host is not None:
            self._host.run(step.copies)
        with self._ranges("plan"):
            planned = self._sequences.plan(step)
        track = self._track(step)
        try:
            with self._ranges("launch"):
                running = track.launch(planned.given, None if self._host is None else self._host.made)
        except Exception:
            track.recover()
            raise
        self._sequences.remember(step, planned, running.place)
        return LaunchedStep(step, planned, running)

    def finish(self, launched: LaunchedStep) -> StepResult:
        """Waits for a step and says what it drew. From any thread; each step once, in the order of its track."""
        step, planned, running = launched
        with self._ranges("wait"):
            results = running.wait()
        sampled: dict[int, tuple[SampledToken, ...]] = {}
        failed = dict(planned.failed)
        for index, lane in enumerate(planned.sampled):
            if results.status[index] and lane.live.failure is None:
                lane.live.failure = f"the logits for position {lane.position} have no finite maximum"
            if lane.live.failure is not None:
                failed[lane.seq_id] = lane.live.failure
            else:
                sampled[lane.seq_id] = (_sampled_token(results, index, lane.live.params.logprobs is not None),)
        return StepResult(step.step_id, sampled, failed)

    def execute(self, step: Step) -> StepResult:
        """Launches and waits."""
        return self.finish(self.launch(step))

    def commit(self, commit: StepCommit) -> None:
        """Nothing to take back: without drafts every row is kept."""

    @property
    def tracks(self) -> Mapping[str, Track]:
        """By name."""
        return self._tracks

    def figures(self) -> DeviceFigures:
        """As of now."""
        pools = [track.pool_figures for track in self._tracks.values()]
        free_bytes, total_bytes = _memory(self.device)
        return DeviceFigures(
            pool_bytes=sum(pool.num_bytes for pool in pools),
            pool_growths=sum(pool.growths for pool in pools),
            poison_resets=sum(pool.poison_resets for pool in pools),
            graph_captures=sum(track.num_captures for track in self._tracks.values()),
            graph_replays=sum(track.num_replays for track in self._tracks.values()),
            device_bytes_used=total_bytes - free_bytes,
            device_bytes_total=total_bytes,
            device_bytes_reserved=torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0,
        )

    def _track(self, step: Step) -> Track:
        """Steps that name no track of ours (the canary's) go to the one for prompts."""
        return self._tracks.get(step.track) or self._tracks.get(PROMPT) or self._tracks[MAIN]


def load_gpu_group(config: EngineConfig) -> DeviceShardGroup[LaunchedStep]:
    """The model of `config` on this process's GPU, checked to compute what it did at its first load, behind a group's interface."""
    shard = GpuShard(config)
    check_canary(shard, config.cache_dir)
    return DeviceShardGroup(shard)


def gpu_numerics_id(device: torch.device, kv_dtype: str) -> str:
    """Names a device class and an arithmetic. Triton's version is part of it: its compiler may order products otherwise."""
    major, minor = triton_version() or (0, 0)
    parts = (*ARITHMETICS, f"v{ARITHMETIC_VERSION}", f"triton{major}.{minor}")
    return f"{device_class(device).name}-{kv_dtype}-{'-'.join(parts)}"


def _track_shapes(config: ResolvedConfig, max_context: int) -> Mapping[str, RoundShapes]:
    shapes = RoundShapes.plan(config.max_lanes, config.batch_tokens, max_context)
    return {MAIN: shapes} if config.tracks == 1 else {DECODE: shapes.decoding(), PROMPT: shapes.prompts()}


def _stream(device: torch.device, name: str) -> torch.cuda.Stream | None:
    """Decode rounds go first where both want the device."""
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device, priority=0 if name == PROMPT else -1)  # type: ignore[no-untyped-call]


def _memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of a device."""
    if device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        return free_bytes, total_bytes
    return _INTERPRETER_BYTES, _INTERPRETER_BYTES


def _graphs_bytes(config: ResolvedConfig, num_layers: int, by_track: Mapping[str, RoundShapes]) -> int:
    """An estimate from measured graphs: kilobytes a launch."""
    if not config.cuda_graphs:
        return 0
    launches = _LAUNCHES_A_LAYER * num_layers + _OTHER_LAUNCHES
    return _BYTES_A_LAUNCH * launches * sum(len(shapes.all()) for shapes in by_track.values())


def _sampled_token(results: Results, index: int, has_logprobs: bool) -> SampledToken:
    token_id = results.token_ids[index]
    if not has_logprobs:
        return SampledToken(token_id)
    pairs = zip(results.top_ids[index], results.top_logprobs[index], strict=True)
    # Places that were not asked for are -1; a token that cannot be drawn has no logarithm to report.
    top = tuple(pair for pair in pairs if pair[0] >= 0 and pair[1] > -math.inf)
    return SampledToken(token_id, TokenLogprobs(token_id, results.logprobs[index], top))
