"""LiveCall: one generate call in progress, and the bounded queue between the replicas' streams and the client."""

import asyncio
from collections import deque

from espalier.cluster.call import ChoiceEvent, GenerateCall
from espalier.cluster.choice import Choice
from espalier.replicas.errors import EngineError
from espalier.replicas.request import TokenEvent


class LiveCall:
    """Choices of a call and the events that its client has not taken yet.

    max_pending: events that may wait per choice; a client so far behind is given up. replays: attempts after the first, of all choices.
    refusal: the error that ended the whole call before its client had an event.
    """

    def __init__(self, call: GenerateCall, choices: list[Choice], *, max_pending: int) -> None:
        self.call = call
        self.choices = choices
        self.replays = 0
        self.refusal: EngineError | None = None
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
