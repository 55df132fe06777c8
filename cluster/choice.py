"""One choice of one call while it lives in the gateway: what was received of it, and everything that resuming it elsewhere would need."""

import enum
from dataclasses import dataclass, field

from espalier.cluster.fleet import AttachedReplica
from espalier.cluster.origin import Origin
from espalier.replicas.errors import EngineError
from espalier.replicas.request import Finish, FinishReason, Request, Timings, TokenEvent, Usage
from espalier.replicas.token_hash import token_sha256


class Verdict(enum.Enum):
    """What to do with an event that came in."""

    DELIVER = "deliver"
    DROP = "drop"
    BROKEN = "broken"


@dataclass(slots=True, eq=False)
class Choice:
    """request: the current attempt; prompt ids, params and seed are in it. replica: where it runs or is being handed to.

    placed: the replica has taken it.
    emitted: ids received so far, all attempts together. started_at, first_token_at: clock of the gateway.
    finished: nothing more comes, by whatever end. origin: what the replica is told of where it comes from.
    """

    index: int
    request: Request
    started_at: float
    replica: AttachedReplica | None = None
    placed: bool = False
    emitted: list[int] = field(default_factory=list)
    first_token_at: float | None = None
    finish: Finish | None = None
    finished: bool = False
    origin: Origin | None = None

    def judge(self, event: TokenEvent) -> Verdict:
        """Whether the event goes on to the client. BROKEN: tokens are missing before it, or its hash is not that of the tokens received."""
        if self.finished or event.attempt != self.request.attempt:
            return Verdict.DROP
        if event.first_index != len(self.emitted):
            return Verdict.BROKEN
        finish = event.finish
        if finish is not None and finish.reason is not FinishReason.ERROR:
            whole = token_sha256([*self.emitted, *event.token_ids]) == finish.token_sha256
            return Verdict.DELIVER if whole else Verdict.BROKEN
        return Verdict.DELIVER

    def receive(self, event: TokenEvent, now: float) -> None:
        """Take in an event that was judged good."""
        self.emitted += event.token_ids
        if self.first_token_at is None and event.token_ids:
            self.first_token_at = now
        if event.finish is not None:
            self.finish = event.finish
            self.finished = True

    def end_with(self, error: EngineError, now: float) -> TokenEvent:
        """End it here, with an error, and return the event that says so. Times are those that the gateway saw."""
        self.finished = True
        first = self.first_token_at if self.first_token_at is not None else now
        self.finish = Finish(
            reason=FinishReason.ERROR,
            usage=Usage(len(self.request.prompt_token_ids), len(self.emitted), cached_tokens=0),
            token_sha256=token_sha256(self.emitted),
            timings=Timings(queue_s=0.0, prefill_s=first - self.started_at, decode_s=now - first),
            error=error,
        )
        return TokenEvent(self.request.request_id, self.request.attempt, len(self.emitted), (), "", finish=self.finish)
