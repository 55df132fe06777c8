"""A shard without a model: its next token is a hash of the whole token history as read from its own blocks, so any wrong table, early free,
wrong order or lost token shows in the tokens. Every broken rule of the Step contract is noted in `violations`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from espalier.replicas.cache.blocks import BlockPool
from espalier.replicas.cache.tier import BlockCopy, HostTier
from espalier.replicas.config import EngineConfig
from espalier.replicas.request import Request, SamplingParams, TokenLogprobs
from espalier.replicas.schedule.step import (
    Lane,
    SampledToken,
    SequenceBegin,
    Step,
    StepCommit,
    StepResult,
    TokenRef,
)
from espalier.replicas.shard_info import ShardInfo

GARBAGE = -1
MASK = 2**64 - 1


def fake_info(
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    max_context: int = 4096,
    vocab_size: int = 997,
    eos: tuple[int, ...] = (0,),
    round_ms: tuple[tuple[int, float], ...] = (),
    num_host_slots: int = 0,
) -> ShardInfo:
    """Facts of a fake shard."""
    return ShardInfo(
        num_blocks=num_blocks,
        block_size=block_size,
        max_context=max_context,
        vocab_size=vocab_size,
        eos_token_ids=eos,
        weights_id="weights",
        numerics_id="numerics",
        quantization="none",
        num_host_slots=num_host_slots,
        round_ms=round_ms,
    )


def fake_config(
    *,
    max_lanes: int = 16,
    batch_tokens: int = 64,
    max_waiting: int = 256,
    max_steps_in_flight: int = 2,
    tracks: int = 1,
    decode_gap_ms: float = 50.0,
    prefix_cache: bool = True,
    progress_timeout_s: float = 10.0,
) -> EngineConfig:
    """What the engine reads of its config; the numbers of blocks come from the shard."""
    return EngineConfig(
        model_path=Path("none"),
        max_lanes=max_lanes,
        batch_tokens=batch_tokens,
        max_waiting=max_waiting,
        max_steps_in_flight=max_steps_in_flight,
        tracks=tracks,
        decode_gap_ms=decode_gap_ms,
        prefix_cache=prefix_cache,
        progress_timeout_s=progress_timeout_s,
    )


def _fold(state: int, token: int) -> int:
    return ((state ^ (token + 1)) * 0x9E3779B97F4A7C15 + (state >> 29)) & MASK


def _start(params: SamplingParams, prompt_len: int) -> int:
    return _fold(_fold(0x243F6A8885A308D3, params.seed), prompt_len)


def solo_tokens(request: Request, info: ShardInfo) -> tuple[int, ...]:
    """All tokens of the request's choice when it runs alone, from an engine that is as simple as can be."""
    params = request.params
    state = _start(params, len(request.prompt_token_ids))
    for token in request.prompt_token_ids:
        state = _fold(state, token)
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(info.eos_token_ids))
    tokens: list[int] = []
    while len(tokens) < params.max_tokens:
        tokens.append((state >> 16) % info.vocab_size)
        if tokens[-1] in ends and len(tokens) >= params.min_tokens:
            break
        state = _fold(state, tokens[-1])
    return tuple(tokens)


@dataclass
class _Known:
    """What the shard was told of one sequence."""

    begin: SequenceBegin
    table: list[int] = field(default_factory=list)
    history: list[int] = field(default_factory=list)


def _no_fault(step: Step, lane: Lane) -> str | None:
    return None


def _no_break(step: Step) -> None:
    return None


class FakeShard:
    """fault: the message with which a lane fails, or None. on_step: called before the rows of a step are computed; may raise, or wait."""

    def __init__(
        self,
        info: ShardInfo,
        *,
        max_lanes: int = 16,
        fault: Callable[[Step, Lane], str | None] = _no_fault,
        on_step: Callable[[Step], None] = _no_break,
    ) -> None:
        self.info = info
        self.max_lanes = max_lanes
        self.fault = fault
        self.on_step = on_step
        self.violations: list[str] = []
        self.steps: list[Step] = []
        self.commits: list[StepCommit] = []
        self._storage = [GARBAGE] * (info.num_blocks * info.block_size)
        self._left: dict[int, list[int]] = {}  # what a block held when it got a new holder, until that one writes to it
        self._host = [[GARBAGE] * info.block_size for _ in range(info.num_host_slots)]
        self._known: dict[int, _Known] = {}
        self._ever: set[int] = set()
        self._sampled: dict[TokenRef, int] = {}
        self._track_of: dict[int, str] = {}
        self._last_taken = -1

    def poison(self, block_ids: list[int]) -> None:
        """Overwrites blocks at the moment when they get a new holder, whatever steps are still to run. Only a copy to the host may still read
        what was there."""
        for block_id in block_ids:
            content = self._storage[self._places(block_id)]
            if GARBAGE not in content:
                self._left[block_id] = content
            self._storage[self._places(block_id)] = [GARBAGE] * self.info.block_size

    def _places(self, block_id: int) -> slice:
        return slice(block_id * self.info.block_size, (block_id + 1) * self.info.block_size)

    def _copy(self, copy: BlockCopy) -> None:
        left = self._left.pop(copy.block_id, None)
        if copy.restores:
            self._require(
                GARBAGE not in self._host[copy.slot], f"host slot {copy.slot} is restored, but was never saved"
            )
            self._storage[self._places(copy.block_id)] = self._host[copy.slot]
        else:
            content = self._storage[self._places(copy.block_id)] if left is None else left
            self._require(GARBAGE not in content, f"block {copy.block_id} is saved, but what it held is overwritten")
            self._host[copy.slot] = content

    def commit(self, commit: StepCommit) -> None:
        self.commits.append(commit)

    def take_over(self, step: Step) -> None:
        """The changes of a step, which on a device with two tracks may long precede its rows. Those taken over already are left."""
        if step.step_id <= self._last_taken:
            return
        self._last_taken = step.step_id
        for copy in step.copies:
            self._copy(copy)
        for seq_id in step.ends:
            self._known.pop(seq_id, None)
        for begin in step.begins:
            self._require(begin.seq_id not in self._ever, f"sequence {begin.seq_id} begins twice")
            self._ever.add(begin.seq_id)
            self._known[begin.seq_id] = _Known(begin)
        self._require(len(self._known) <= self.max_lanes, f"{len(self._known)} sequences at once")
        for append in step.appends:
            self._known[append.seq_id].table += append.block_ids
        for observed in step.observed:
            history = self._known[observed.seq_id].history
            self._require(observed.start == len(history), f"sequence {observed.seq_id}: observed with a gap")
            history += observed.token_ids

    def execute(self, step: Step) -> StepResult:
        self.steps.append(step)
        self.take_over(step)
        self.on_step(step)
        self._track_of[step.step_id] = step.track
        sampled: dict[int, tuple[SampledToken, ...]] = {}
        failed: dict[int, str] = {}
        row = 0
        for lane in step.lanes:
            row += len(lane.tokens)
            message = self.fault(step, lane)
            if message is None and any(isinstance(t, TokenRef) and t not in self._sampled for t in lane.tokens):
                message = "its token was never sampled"
            if message is not None:
                failed[lane.seq_id] = message
                continue
            refs = [token for token in lane.tokens if isinstance(token, TokenRef)]
            strays = [token for token in refs if self._track_of[token.step_id] != step.track]
            self._require(not strays, f"step {step.step_id} reads tokens of another track: {strays}")
            tokens = self._run(lane)
            if tokens:
                self._sampled[TokenRef(step.step_id, row - 1)] = tokens[0].token_id
            sampled[lane.seq_id] = tokens
        return StepResult(step.step_id, sampled, failed)

    def _run(self, lane: Lane) -> tuple[SampledToken, ...]:
        known = self._known[lane.seq_id]
        params = known.begin.params
        tokens = [self._sampled[token] if isinstance(token, TokenRef) else token for token in lane.tokens]
        for position, token in enumerate(tokens, start=lane.start):
            self._storage[self._slot(known, position)] = token
            self._left.pop(known.table[position // self.info.block_size], None)
        if params.needs_history:
            self._require(
                len(known.history) == lane.start, f"sequence {lane.seq_id}: {len(known.history)} tokens observed"
            )
            known.history += tokens
        if lane.num_sampled == 0:
            return ()
        read = [self._storage[self._slot(known, position)] for position in range(lane.start + len(tokens))]
        self._require(GARBAGE not in read, f"sequence {lane.seq_id} reads a block that is not its own any more")
        self._require(not params.needs_history or known.history == read, f"sequence {lane.seq_id}: wrong history")
        state = _start(params, known.begin.prompt_len)
        for token in read:
            state = _fold(state, token)
        token = (state >> 16) % self.info.vocab_size
        return (SampledToken(token, None if params.logprobs is None else TokenLogprobs(token, -1.0)),)

    def _slot(self, known: _Known, position: int) -> int:
        size = self.info.block_size
        return known.table[position // size] * size + position % size

    def _require(self, ok: bool, message: str) -> None:
        if not ok:
            self.violations.append(message)


class PoisoningPool(BlockPool):
    """A pool whose blocks lose their content when they get a new holder."""

    def __init__(self, shard: FakeShard) -> None:
        super().__init__(shard.info.num_blocks, HostTier(shard.info.num_host_slots))
        self._shard = shard

    def allocate(self, count: int) -> list[int]:
        block_ids = super().allocate(count)
        self._shard.poison(block_ids)
        return block_ids


class FakeText:
    """A vocabulary where token 17 reads "<17>". broken: ids whose text cannot be made."""

    def __init__(self, broken: frozenset[int] = frozenset()) -> None:
        self.broken = broken

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self.broken:
            raise ValueError(f"token {token_id} has no text")
        return b"<%d>" % token_id

    def is_special(self, token_id: int) -> bool:
        return False
