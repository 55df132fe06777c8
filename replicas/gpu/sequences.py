"""What steps have said of live sequences, on the host, and what follows for the device: steps in, packed rounds out. Knows no CUDA.

A failure stays with its sequence: its lanes are left out of rounds from then on, and fail with the message that it failed with.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from espalier.replicas.gpu.inputs import Words
from espalier.replicas.gpu.state import SlotState, is_greedy
from espalier.replicas.gpu.track import LaneInput, Observation, RoundInput
from espalier.replicas.request import SamplingParams
from espalier.replicas.schedule.step import Lane, Step

# Steps of a track whose tokens a TokenRef may name: two in flight, and one to spare.
_REMEMBERED_STEPS = 3


@dataclass(slots=True)
class Live:
    """A sequence that has begun. num_blocks: entries of its table so far. failure: set when a row of it failed."""

    slot: int
    params: SamplingParams
    num_blocks: int = 0
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class SampledLane:
    """A lane with a sampled row: the position of the token that it draws."""

    seq_id: int
    live: Live
    position: int


@dataclass(frozen=True, slots=True)
class PlannedRound:
    """sampled: in the order of drawn tokens. failed: lanes that are not run, with the reason."""

    given: RoundInput
    sampled: tuple[SampledLane, ...]
    failed: dict[int, str]


@dataclass(slots=True)
class _Recent:
    """Where on the device the tokens of a track's last steps are: (step, row) -> place."""

    places: OrderedDict[int, dict[int, int]] = field(default_factory=OrderedDict)


class LiveSequences:
    """Takes over steps in the order in which they come."""

    def __init__(self, state: SlotState, num_slots: int, eos_token_ids: Sequence[int]) -> None:
        self._state = state
        self._eos_token_ids = eos_token_ids
        self._free = list(reversed(range(num_slots)))
        self._live: dict[int, Live] = {}
        self._recent: dict[str, _Recent] = {}

    def plan(self, step: Step) -> PlannedRound:
        """The round of a step, its changes taken over."""
        for seq_id in step.ends:
            ended = self._live.pop(seq_id, None)
            if ended is not None:
                self._free.append(ended.slot)
        updates: list[Words] = []
        cleared: list[int] = []
        for begin in step.begins:
            assert begin.seq_id not in self._live, f"sequence {begin.seq_id} began twice"
            live = self._live[begin.seq_id] = Live(self._free.pop(), begin.params)
            updates.append(self._state.begin_updates(live.slot, begin.params, begin.prompt_len, self._eos_token_ids))
            if begin.params.needs_history:
                cleared.append(live.slot)
        for append in step.appends:
            live = self._live[append.seq_id]
            updates.append(self._state.block_updates(live.slot, live.num_blocks, append.block_ids))
            live.num_blocks += len(append.block_ids)
        observations = [Observation(self._live[seen.seq_id].slot, seen.start, seen.token_ids) for seen in step.observed]
        lanes: list[LaneInput] = []
        sampled: list[SampledLane] = []
        failed: dict[int, str] = {}
        for lane in step.lanes:
            live = self._live[lane.seq_id]
            tokens = live.failure or self._resolve(step.track, lane)
            if isinstance(tokens, str):
                failed[lane.seq_id] = live.failure = tokens
                continue
            lanes.append(LaneInput(live.slot, lane.start, tokens, bool(lane.num_sampled), live.params.needs_history))
            if lane.num_sampled:
                sampled.append(SampledLane(lane.seq_id, live, lane.start + len(tokens)))
        given = RoundInput(
            lanes=lanes,
            updates=np.concatenate(updates) if updates else np.empty((0, 2), dtype=np.int32),
            cleared=cleared,
            observations=observations,
            greedy=all(is_greedy(self._live[lane.seq_id].params) for lane in step.lanes),
        )
        return PlannedRound(given, tuple(sampled), failed)

    def _resolve(self, track: str, lane: Lane) -> list[int] | str:
        """Token ids, or -1 - place for those that are on the device only; or why the lane cannot be run."""
        assert lane.num_sampled <= 1, "rows behind a sampled one are drafts, which are not served yet"
        recent = self._recent[track].places if track in self._recent else {}
        tokens: list[int] = []
        for token in lane.tokens:
            if isinstance(token, int):
                tokens.append(token)
                continue
            place = recent.get(token.step_id, {}).get(token.row)
            if place is None:
                return f"row {token.row} of step {token.step_id} gave no token"
            tokens.append(-1 - place)
        return tokens

    def remember(self, step: Step, planned: PlannedRound, first_place: int) -> None:
        """Notes where the step's drawn tokens will be: at first_place, first_place + 1, ..."""
        places: dict[int, int] = {}
        by_seq_id = {lane.seq_id: index for index, lane in enumerate(planned.sampled)}
        row = 0
        for lane in step.lanes:
            row += len(lane.tokens)
            if lane.seq_id in by_seq_id:
                places[row - 1] = first_place + by_seq_id[lane.seq_id]
        recent = self._recent.setdefault(step.track, _Recent()).places
        recent[step.step_id] = places
        while len(recent) > _REMEMBERED_STEPS:
            recent.popitem(last=False)
