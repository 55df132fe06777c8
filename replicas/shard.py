"""Shard: one model on one device, driven by Steps. It keeps what steps only change (tables, parameters, histories, recent tokens).

Knows no requests, no scheduling and no text. A failure stays with the sequence that caused it: when a round fails it is run again lane by
lane, which is exact, since a row's bits do not depend on its company.
"""

import logging
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from espalier.replicas.batch import LaneRows, make_batch
from espalier.replicas.cache.host_copies import HostCopies, blocks_view
from espalier.replicas.cache.host_memory import plan_host_slots
from espalier.replicas.cache.storage import KVCache, kv_bytes_per_token, machine_memory_bytes, plan_memory
from espalier.replicas.config import EngineConfig, resolved
from espalier.replicas.cpus import usable_cpus
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.model.checkpoint import Checkpoint, open_checkpoint
from espalier.replicas.model.fingerprint import check_record, fingerprint
from espalier.replicas.model.invariance import check_row_invariance
from espalier.replicas.model.vector_math import settle_vector_math
from espalier.replicas.model.weights import load_decoder
from espalier.replicas.request import SamplingParams
from espalier.replicas.sampling.sampler import SampleRow, TokenHistory, sample_row
from espalier.replicas.sampling.stops import banned_token_ids
from espalier.replicas.schedule.step import Lane, SampledToken, Step, StepCommit, StepResult
from espalier.replicas.shard_info import ShardInfo

# Raised whenever the order of any sum, or the definition of any operation of a row, changes.
ARITHMETIC_VERSION = 1
# Steps whose tokens a TokenRef may name: two in flight on each of two tracks, and some to spare.
_REMEMBERED_STEPS = 6

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sequence:
    """What steps have said of a live sequence.

    history: what its penalties read, if it has any; seen: the tokens observed in it, by position, to build it again when rows are not kept.
    failure: set when a row failed; rows planned since then fail with the same message.
    """

    params: SamplingParams
    prompt_len: int
    block_ids: list[int] = field(default_factory=list)
    history: TokenHistory | None = None
    seen: list[int] = field(default_factory=list)
    failure: str | None = None


@dataclass(slots=True)
class _Ran:
    """A step that has run: its tokens by sampled row, and its lanes by sequence."""

    tokens: dict[int, int]
    lanes: dict[int, Lane]


class Shard:
    """Loads the model of `config` and runs its rounds. Raises CheckpointError, InvalidRequestError (an option) or EngineError."""

    def __init__(self, options: EngineConfig) -> None:
        config = resolved(options)
        if config.device != "cpu":
            raise InvalidRequestError(
                f"device: {config.device} is another shard's, see replicas/gpu/shard.py", param="device"
            )
        torch.set_num_threads(config.cpu_threads or usable_cpus())
        settle_vector_math()
        cache_dir = config.cache_dir.expanduser()
        checkpoint = open_checkpoint(config.model_path.expanduser())
        identity = fingerprint(checkpoint)
        check_record(checkpoint, identity, cache_dir)
        num_blocks, max_context = plan_memory(config, checkpoint.config, machine_memory_bytes())
        block_bytes = config.block_size * kv_bytes_per_token(checkpoint.config, config.kv_dtype)
        num_host_slots = plan_host_slots(config, block_bytes, kv_bytes=num_blocks * block_bytes)
        self._decoder, decoded_crc = load_decoder(checkpoint, identity, cache_dir, max_context)
        arithmetic = zlib.crc32(check_row_invariance(self._decoder).encode(), decoded_crc)
        self._cache = KVCache(checkpoint.config, num_blocks, config.block_size, config.kv_dtype)
        self._host = (
            HostCopies(blocks_view(self._cache.storage), num_host_slots, self._cache.zero_block)
            if num_host_slots
            else None
        )
        self._sequences: dict[int, _Sequence] = {}
        self._recent: OrderedDict[int, _Ran] = OrderedDict()
        self.info = ShardInfo(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_context=max_context,
            vocab_size=checkpoint.config.vocab_size,
            eos_token_ids=checkpoint.config.eos_token_ids,
            weights_id=identity.weights_id,
            numerics_id=f"cpu{ARITHMETIC_VERSION}-{config.kv_dtype}-{arithmetic:08x}",
            quantization=quantization(checkpoint),
            num_host_slots=num_host_slots,
        )

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """Runs one round: takes over its changes, computes its rows, samples. Only what fails is in the result's `failed`."""
        if self._host is not None:
            self._host.run(step.copies)
        self._take_over(step)
        tokens: dict[int, int] = {}
        failed: dict[int, str] = {}
        lanes: list[LaneRows] = []
        first_sampled: dict[int, int] = {}
        num_rows = 0
        for lane in step.lanes:
            num_rows += len(lane.tokens)
            first_sampled[lane.seq_id] = num_rows - lane.num_sampled
            rows = self._resolve(lane)
            if isinstance(rows, str):
                failed[lane.seq_id] = rows
            else:
                lanes.append(rows)
        sampled: dict[int, tuple[SampledToken, ...]] = {}
        for rows, logits in self._forward(lanes):
            drawn = logits if isinstance(logits, str) else self._sample(rows, logits)
            if isinstance(drawn, str):
                failed[rows.seq_id] = drawn
                continue
            if drawn:
                sampled[rows.seq_id] = drawn
            tokens.update({first_sampled[rows.seq_id] + i: token.token_id for i, token in enumerate(drawn)})
        for seq_id, message in failed.items():
            self._sequences[seq_id].failure = message
        self._recent[step.step_id] = _Ran(tokens, {lane.seq_id: lane for lane in step.lanes})
        while len(self._recent) > _REMEMBERED_STEPS:
            self._recent.popitem(last=False)
        return StepResult(step.step_id, sampled, failed)

    def commit(self, commit: StepCommit) -> None:
        """Takes back what penalties saw of rows that are not kept. Their keys and values need nothing: later rows overwrite them."""
        ran = self._recent.get(commit.step_id)
        if ran is None:
            return
        for seq_id, num_kept in commit.accepted:
            lane, sequence = ran.lanes[seq_id], self._sequences.get(seq_id)
            if sequence is not None and sequence.history is not None and num_kept < len(lane.tokens):
                kept, sequence.seen = sequence.seen[: lane.start + num_kept], []
                sequence.history = TokenHistory(self.info.vocab_size)
                _observe(sequence, 0, kept)

    def _take_over(self, step: Step) -> None:
        for seq_id in step.ends:
            self._sequences.pop(seq_id, None)
        for begin in step.begins:
            assert begin.seq_id not in self._sequences, f"sequence {begin.seq_id} began twice"
            history = TokenHistory(self.info.vocab_size) if begin.params.needs_history else None
            self._sequences[begin.seq_id] = _Sequence(begin.params, begin.prompt_len, history=history)
        for append in step.appends:
            self._sequences[append.seq_id].block_ids.extend(append.block_ids)
        for observed in step.observed:
            _observe(self._sequences[observed.seq_id], observed.start, observed.token_ids)

    def _resolve(self, lane: Lane) -> LaneRows | str:
        """The lane with its tokens known, or why it cannot be run."""
        sequence = self._sequences[lane.seq_id]
        if sequence.failure is not None:
            return sequence.failure
        token_ids: list[int] = []
        for token in lane.tokens:
            if not isinstance(token, int):
                earlier = self._recent.get(token.step_id)
                if earlier is None or token.row not in earlier.tokens:
                    return f"row {token.row} of step {token.step_id} gave no token"
                token = earlier.tokens[token.row]
            if not 0 <= token < self.info.vocab_size:
                return f"token {token} is not in the vocabulary of {self.info.vocab_size}"
            token_ids.append(token)
        return LaneRows(lane.seq_id, lane.start, tuple(token_ids), lane.num_sampled, sequence.block_ids)

    def _forward(self, lanes: Sequence[LaneRows]) -> Iterator[tuple[LaneRows, Tensor | str]]:
        """Each lane with the logits of its sampled rows, fp32 [num_sampled, vocab], or with what went wrong."""
        if not lanes:
            return
        try:
            batch = make_batch(
                lanes,
                block_size=self.info.block_size,
                num_kv_heads=self._decoder.config.num_kv_heads,
                zero_block=self._cache.zero_block,
            )
            logits = self._decoder.forward(batch, self._cache)
        except Exception as error:
            if len(lanes) == 1:
                logger.exception("computing rows of sequence %d failed", lanes[0].seq_id)
                yield lanes[0], _describe(error)
                return
            for lane in lanes:
                yield from self._forward([lane])
            return
        parts = torch.split_with_sizes(logits, [lane.num_sampled for lane in lanes])
        yield from zip(lanes, parts, strict=True)

    def _sample(self, rows: LaneRows, logits: Tensor) -> tuple[SampledToken, ...] | str:
        """The tokens of a lane's sampled rows, or why there are none."""
        sequence = self._sequences[rows.seq_id]
        params = sequence.params
        drawn: list[SampledToken] = []
        try:
            first_sampled = len(rows.token_ids) - rows.num_sampled
            _observe(sequence, rows.start, rows.token_ids[:first_sampled])
            for i, row_logits in enumerate(logits):
                position = rows.start + first_sampled + i
                _observe(sequence, position, rows.token_ids[first_sampled + i : first_sampled + i + 1])
                banned = banned_token_ids(params, self.info.eos_token_ids, position + 1 - sequence.prompt_len)
                drawn.append(sample_row(row_logits, SampleRow(params, position + 1, sequence.history, banned)))
        except Exception as error:
            logger.exception("sampling for sequence %d failed", rows.seq_id)
            return _describe(error)
        return tuple(drawn)


def _observe(sequence: _Sequence, start: int, token_ids: Sequence[int]) -> None:
    if sequence.history is not None and token_ids:
        sequence.history.observe(start, token_ids, sequence.prompt_len)
        sequence.seen.extend(token_ids)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def quantization(checkpoint: Checkpoint) -> str:
    """For people: `exl3 4.0bpw`, or the dtype of plain weights."""
    quant, first = checkpoint.config.quant, checkpoint.spec.layers[0].down.key
    if quant is not None or checkpoint.is_quantized(first):
        return "exl3" if quant is None or quant.bits is None else f"exl3 {quant.bits:.2g}bpw"
    return checkpoint.entry(f"{first}.weight").dtype.lower()
