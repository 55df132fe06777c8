"""Track: one execution stream, and the steps in flight on it. On a CPU there is one; a GPU adds its stream, graphs, workspace and counters."""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from espalier.replicas.schedule.step import Step, StepResult


class Flight(NamedTuple):
    """A step on its way, and what will come back."""

    step: Step
    result: Future[StepResult]


@dataclass(slots=True, kw_only=True)
class Track:
    """Runs its steps one after the other. max_rows: rows in one step. max_in_flight: steps planned before the first has come back."""

    name: str
    max_rows: int
    max_in_flight: int
    flights: deque[Flight] = field(default_factory=deque)

    @property
    def has_room(self) -> bool:
        """Whether another step may be planned."""
        return len(self.flights) < self.max_in_flight
