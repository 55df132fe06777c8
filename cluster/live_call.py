"""LiveCall: one generate call in progress, and the bounded queue between the replicas' streams and the client."""

import asyncio
from collections import deque

from espalier.cluster.call import ChoiceEvent, GenerateCall
from espalier.cluster.choice import Choice
from espalier.cluster.tracing import Span
from espalier.replicas.errors import EngineError
from espalier.replicas.request import TokenEvent

OK = "ok"
CLIENT_LEFT = "client_left"


class LiveCall:
    """Choices of a call and the events that its client has not taken yet.

    max_pending: events that may wait per choice; a client so far behind is given up. replays: attempts after the first, of all choices.
    refusal: the error that ended the whole call before its client had an event. span: None where tracing is off.
    """

    def __init__(self, call: GenerateCall, choices: list[Choice], *, max_pending: int) -> None:
        self.call = call
        self.choices = choices
        self.replays = 0
        self.refusal: EngineError | None = None
        self.span: Span | None = None
        self.deadline_timer: asyncio.TimerHandle | None = None
        self._max_pending = max_pending * len(choices)
        self._pending: deque[ChoiceEvent] = deque()
        self._arrived = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether the client has fallen too far behind."""
        return len(self._pending) >= self._max_pending

    @property
    def over(self) -> bool:
        """Whether nothing more will come and everything was taken."""
        return not self._pending and all(choice.finished for choice in self.choices)

    @property
    def outcome(self) -> str:
        """How the call ended: OK, CLIENT_LEFT or codes of errors. Only before the choices that a leaving client left behind are marked finished."""
        if self.refusal is not None:
            return self.refusal.code
        finishes = [choice.finish for choice in self.choices if choice.finish is not None]
        if len(finishes) < len(self.choices):
            return CLIENT_LEFT
        errors = {finish.error.code for finish in finishes if finish.error is not None}
        return ",".join(sorted(errors)) or OK

    @property
    def time_to_first_token_s(self) -> float | None:
        """From the call to the first token of any choice; None before."""
        first_at = min((c.first_token_at for c in self.choices if c.first_token_at is not None), default=None)
        return None if first_at is None else first_at - self.choices[0].started_at

    def put(self, choice: Choice, event: TokenEvent, replica_id: str) -> None:
        """Queue an event of one of the choices."""
        self._pending.append(ChoiceEvent(choice.index, event, replica_id))
        self._arrived.set()

    async def next(self) -> ChoiceEvent:
        """The oldest event not taken yet; waits for one. Only while not `over`."""
        while not self._pending:
            self._arrived.clear()
            await self._arrived.wait()
        return self._pending.popleft()
