"""StepBuilder: collects one Step within its budgets, so that its size is bounded whatever the context length."""

from espalier.replicas.cache.table import blocks_for
from espalier.replicas.cache.tier import BlockCopy, HostTier
from espalier.replicas.schedule.pacing import chunk_rows
from espalier.replicas.schedule.step import BlockAppend, Lane, Observed, SequenceBegin, Step
from espalier.replicas.schedule.tracks import Track
from espalier.replicas.sequence import Sequence

BLOCKS_PER_STEP = 1024
OBSERVED_PER_STEP = 4096
# What a round waits for at most: some hundred megabytes of a large model, so milliseconds on the bus of a GPU.
RESTORES_PER_STEP = 256


class StepBuilder:
    """One step in the making. Whoever is added first gets first of what is left: rows, block ids, observed tokens, copies.

    host: gives out the copies that the step's changes need.
    """

    def __init__(self, step_id: int, track: Track, host: HostTier, *, max_lanes: int) -> None:
        self._step_id = step_id
        self._track = track
        self._host = host
        self._copies: list[BlockCopy] = []
        self._lanes: list[Lane] = []
        self._begins: list[SequenceBegin] = []
        self._appends: list[BlockAppend] = []
        self._observed: list[Observed] = []
        self.num_rows = 0
        self._max_rows = track.max_rows
        self._num_rows_before = 0
        # Every decoding lane may need a block in the same round.
        self._blocks_left = max(BLOCKS_PER_STEP, max_lanes)
        self._observed_left = OBSERVED_PER_STEP
        self._restores_left = RESTORES_PER_STEP

    @property
    def rows_left(self) -> int:
        """Rows that can still be added."""
        return self._max_rows - self.num_rows

    def limit_prompts(self, num_rows: int) -> None:
        """What is added from now on are prompts, with no more than so many rows."""
        self._max_rows = min(self._max_rows, self.num_rows + num_rows)
        self._num_rows_before = self.num_rows

    def begin(self, sequence: Sequence, restore: tuple[tuple[str, int], ...]) -> None:
        """Tells the shards of a sequence that was just admitted."""
        self._begins.append(
            SequenceBegin(sequence.residence.seq_id, sequence.request.params, sequence.prompt_len, restore)
        )

    def add(self, sequence: Sequence) -> None:
        """Adds as many of the sequence's next rows as fit; none while the shards still lack restored tokens or blocks before them."""
        if not all([self._send_observed(sequence), self._send_restored(sequence)]):  # a list: both get on
            return
        residence = sequence.residence
        num_rows = chunk_rows(
            residence.num_planned,
            sequence.num_to_plan,
            self.rows_left,
            is_first=self.num_rows == self._num_rows_before,
        )
        num_rows = min(num_rows, self._send_blocks(sequence, residence.num_planned + num_rows) - residence.num_planned)
        if num_rows > 0:
            self._lanes.append(sequence.plan(num_rows, step_id=self._step_id, first_row=self.num_rows))
            self.num_rows += num_rows

    def _send_observed(self, sequence: Sequence) -> bool:
        """Whether the shards know all restored tokens that sampling needs."""
        if not sequence.request.params.needs_history:
            return True
        residence = sequence.residence
        start = residence.num_observed
        stop = min(residence.num_restored, start + self._observed_left)
        if stop > start:
            token_ids = tuple(sequence.chain.token_ids[start:stop])
            self._observed.append(Observed(residence.seq_id, start, token_ids))
            self._observed_left -= stop - start
            residence.num_observed = stop
        return residence.num_observed == residence.num_restored

    def _send_restored(self, sequence: Sequence) -> bool:
        """Whether all state before the first row is on the device, as far as steps have been told. Another sequence may have seen to it."""
        residence = sequence.residence
        num_blocks = residence.num_restored // residence.table.block_size
        while residence.num_blocks_filled < num_blocks and self._restores_left:
            copies = self._host.before_read(residence.table.block_ids[residence.num_blocks_filled])
            self._copies += copies
            self._restores_left -= bool(copies)
            residence.num_blocks_filled += 1
        return residence.num_blocks_filled == num_blocks

    def _send_blocks(self, sequence: Sequence, num_positions: int) -> int:
        """Sends what the shards lack of the table for so many positions; returns for how many positions they have it then."""
        residence = sequence.residence
        start = residence.num_blocks_sent
        stop = min(blocks_for(num_positions, residence.table.block_size), start + self._blocks_left)
        if stop > start:
            block_ids = residence.table.block_ids[start:stop]
            self._copies += self._host.before_write(block_ids)
            self._appends.append(BlockAppend(residence.seq_id, tuple(block_ids)))
            self._blocks_left -= stop - start
            residence.num_blocks_sent = stop
        return residence.num_blocks_sent * residence.table.block_size

    def build(self, ends: tuple[int, ...]) -> Step | None:
        """The step; None when there is nothing to compute or to tell ahead of it."""
        if not (self._lanes or self._copies or self._begins or self._appends or self._observed):
            return None
        return Step(
            step_id=self._step_id,
            track=self._track.name,
            lanes=tuple(self._lanes),
            copies=tuple(self._copies),
            begins=tuple(self._begins),
            appends=tuple(self._appends),
            observed=tuple(self._observed),
            ends=ends,
        )
