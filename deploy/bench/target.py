"""What is measured, as the bench sees it: takes calls, answers each with a record. A server over HTTP is one kind, an engine in this process another.

Knows neither. The plan of a bench, its figures and its reports are written against this alone.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from espalier.deploy.bench.prompts import BenchPrompt
from espalier.deploy.bench.stats import StreamRecord
from espalier.replicas.errors import EngineError
from espalier.replicas.request import SamplingParams

IDLE_TIMEOUT_S = 30.0
_POLL_S = 0.05


class BenchError(EngineError):
    """The target could not be measured."""

    code = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request. use_prefix_cache: False computes the whole prompt and leaves nothing behind; only where the target `can_skip_cache`.

    leave_after: the client goes away once it has so many tokens, 0 at once; None stays to the end. session: calls of one session meet one replica.
    """

    prompt: BenchPrompt
    params: SamplingParams
    use_prefix_cache: bool = True
    leave_after: int | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """What a target says of itself; None where it does not tell.

    max_context: tokens of prompt and reply together. kv_tokens: tokens that the KV blocks of all requests hold. lag_s: how old what `state` tells
    may be. is_exact: replies carry the hash of their tokens. can_skip_cache: calls may go past the prefix cache. setup: whatever else was set,
    for the report.
    """

    where: str
    model: str
    device: str | None = None
    max_context: int | None = None
    vocab_size: int | None = None
    block_size: int | None = None
    kv_tokens: int | None = None
    numerics_id: str | None = None
    quantization: str | None = None
    lag_s: float = 0.0
    is_exact: bool = False
    can_skip_cache: bool = False
    setup: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetState:
    """What a target holds now; None where it does not tell.

    num_live: requests that run or wait. held_share: of the KV blocks, those that live requests hold; blocks kept for later ones are free.
    device_bytes: of its devices' memory, what it holds for tensors. host_bytes: the most that its process has had resident.
    cpu_s: CPU that its process has used.
    counts: whatever else it has counted since its start, by name.
    """

    num_live: int | None = None
    held_share: float | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    cpu_s: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        """Nothing that it tells of says that a request is still there."""
        return not self.num_live and not self.held_share


class Target(Protocol):
    """Takes calls from one thread. Failures of a call end up in its record, never in exceptions."""

    @property
    def info(self) -> TargetInfo: ...

    def submit(self, calls: Sequence[Call]) -> list[Future[StreamRecord]]:
        """Starts all of them at one moment; the records come in any order."""
        ...

    def token_ids(self, prompt: BenchPrompt) -> tuple[int, ...]:
        """The prompt as the model reads it. Raises BenchError or InvalidRequestError when it cannot be told."""
        ...

    def state(self) -> TargetState:
        """As of now."""
        ...

    def close(self) -> None:
        """Gives back what opening it took."""
        ...


def run_together(target: Target, calls: Sequence[Call]) -> list[StreamRecord]:
    """All calls at once; their records in the order of the calls."""
    return [future.result() for future in target.submit(calls)]


def run_alone(target: Target, calls: Sequence[Call]) -> list[StreamRecord]:
    """One call after the other."""
    return [run_together(target, [call])[0] for call in calls]


def state_at_rest(target: Target, timeout_s: float = IDLE_TIMEOUT_S) -> TargetState:
    """The state once it has been idle for as long as its figures may be old, or what it still is after timeout_s."""
    deadline = time.monotonic() + timeout_s
    idle_since: float | None = None
    while True:
        now, state = time.monotonic(), target.state()
        if not state.is_idle:
            idle_since = None
        elif idle_since is None:
            idle_since = now
        if (idle_since is not None and now - idle_since >= target.info.lag_s) or now >= deadline:
            return state
        time.sleep(_POLL_S)
