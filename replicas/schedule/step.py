"""A Step: what one round computes, as plain data. It carries differences, not state, and pickles: it is the only thing sent to shards.

Its size is bounded whatever the context length: prompts come in chunks, a long block table or history arrives over several steps.
"""

from dataclasses import dataclass

from espalier.replicas.cache.tier import BlockCopy
from espalier.replicas.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenRef:
    """The token sampled from row `row` of step `step_id`, which may not be on the host yet."""

    step_id: int
    row: int


@dataclass(frozen=True, slots=True)
class SequenceBegin:
    """A sequence the shards have not met. Its blocks follow in BlockAppend.

    prompt_len: tokens from this position on are output (presence and frequency penalties count only those).
    restore: (state kind, handle) pairs for kinds whose state is not held in blocks.
    """

    seq_id: int
    params: SamplingParams
    prompt_len: int
    restore: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class BlockAppend:
    """Block ids that extend a sequence's table, in position order."""

    seq_id: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Observed:
    """Tokens restored from the prefix cache that sampling's penalties must know; they are not computed."""

    seq_id: int
    start: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lane:
    """The rows of one sequence in this round: tokens at positions start, start + 1, ...; the last `num_sampled` of them are sampled from."""

    seq_id: int
    start: int
    tokens: tuple[int | TokenRef, ...]
    num_sampled: int


@dataclass(frozen=True, slots=True)
class Step:
    """One round. Order of effect: copies, ends, begins, appends, observed, then the lanes' rows.

    copies: between blocks and host slots, to be made in their order, and after those of earlier steps; done before any row of this step or a later
    one, on any track. No step in flight touches their blocks. They are made even where the step's rows fail; a shard that fails to make one
    fails every later step.

    Steps of two tracks may run side by side, but shards take over their changes in the order of submission. All but `ends` concern sequences of
    the step's own track; a sequence changes its track, ends or is begun anew only when no step in flight reads it, and no TokenRef leaves a track.

    Rows are numbered through the lanes in order, 0 for the first row of the first lane: TokenRef.row counts so.
    """

    step_id: int
    track: str
    lanes: tuple[Lane, ...]
    copies: tuple[BlockCopy, ...] = ()
    begins: tuple[SequenceBegin, ...] = ()
    appends: tuple[BlockAppend, ...] = ()
    observed: tuple[Observed, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows computed in this round, all lanes together."""
        return sum(len(lane.tokens) for lane in self.lanes)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The token drawn from one sampled row."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced: per sequence its sampled tokens in row order, or the message of what failed for that sequence alone."""

    step_id: int
    sampled: dict[int, tuple[SampledToken, ...]]
    failed: dict[int, str]


@dataclass(frozen=True, slots=True)
class StepCommit:
    """How many of a step's rows are kept, per sequence; state that advances by rows moves on by that many."""

    step_id: int
    accepted: tuple[tuple[int, int], ...]
