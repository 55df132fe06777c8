"""Track: what runs steps one after the other, and the steps in flight on it. With two, one for prompts and one for decoding, rounds of both run
side by side on a GPU, each on a stream of its own."""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from espalier.replicas.config import ResolvedConfig
from espalier.replicas.schedule.step import Step, StepResult

# Names: one track that does everything, or two that share it.
MAIN = "main"
PROMPT = "prompt"
DECODE = "decode"


class Flight(NamedTuple):
    """A step on its way, and what will come back."""

    step: Step
    result: Future[StepResult]


@dataclass(slots=True, kw_only=True)
class Track:
    """max_rows: in one step. max_in_flight: steps planned before the first has come back.

    takes_prompts, takes_decodes: which lanes it runs; prompts brings sequences in, decodes lets them go on by one row.
    progress_at: when its oldest step in flight became the oldest, by the engine's clock.
    """

    name: str
    max_rows: int
    max_in_flight: int
    takes_prompts: bool = True
    takes_decodes: bool = True
    flights: deque[Flight] = field(default_factory=deque)
    progress_at: float = 0.0

    @property
    def has_room(self) -> bool:
        """Whether another step may be planned."""
        return len(self.flights) < self.max_in_flight

    @property
    def has_landed(self) -> bool:
        """Whether its oldest step has come back; later ones are taken in after that one."""
        return bool(self.flights) and self.flights[0].result.done()


def make_tracks(config: ResolvedConfig) -> list[Track]:
    """The tracks of an engine, in the order in which they are planned: decoding first, since its rounds are short and waited for."""
    depth = config.max_steps_in_flight
    if config.tracks == 1:
        return [Track(name=MAIN, max_rows=config.batch_tokens, max_in_flight=depth)]
    return [
        Track(name=DECODE, max_rows=config.max_lanes, max_in_flight=depth, takes_prompts=False),
        Track(name=PROMPT, max_rows=config.batch_tokens, max_in_flight=depth, takes_decodes=False),
    ]


def first_landed(tracks: Iterable[Track]) -> Track | None:
    """Of the tracks whose oldest step has come back, the one whose step was planned first, so that none waits for ever behind another."""
    return min(
        (track for track in tracks if track.has_landed),
        key=lambda track: track.flights[0].step.step_id,
        default=None,
    )
