"""Outboxes: sorts the events of a replica's rounds by the gateway that sent the request. However far a stream is behind, it gets one message."""

import asyncio

from espalier.replicas.request import TokenEvent

MAX_WAITING_EVENTS = 65536


class Outbox:
    """Events on their way to one gateway. broken: the gateway has not taken them for so long that it must attach anew.

    renewed_at: when the gateway was last known to live, on the caller's clock.
    """

    def __init__(self, now: float) -> None:
        self._events: list[TokenEvent] = []
        self._something = asyncio.Event()
        self.broken = False
        self.renewed_at = now

    def put(self, event: TokenEvent) -> None:
        """Queue one event. `notify` wakes the stream, once a round."""
        if len(self._events) >= MAX_WAITING_EVENTS:
            self.broken = True
        else:
            self._events.append(event)

    def notify(self) -> None:
        """Wake the stream."""
        self._something.set()

    async def wait(self, timeout_s: float) -> None:
        """Return when notified, or after so many seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._something.wait()
        except TimeoutError:
            pass

    def take(self) -> tuple[TokenEvent, ...]:
        """All that has gathered, in order."""
        self._something.clear()
        events, self._events = tuple(self._events), []
        return events


class Outboxes:
    """All attached gateways of one replica, and which of them sent which live request."""

    def __init__(self) -> None:
        self._boxes: dict[str, Outbox] = {}
        self._owners: dict[str, str] = {}

    def attach(self, gateway: str, now: float) -> tuple[Outbox, list[str]]:
        """A new outbox for the gateway, and its requests of an earlier stream, which nobody waits for any more."""
        orphans = self._forget(gateway)
        if (old := self._boxes.get(gateway)) is not None:
            old.broken = True
            old.notify()
        self._boxes[gateway] = Outbox(now)
        return self._boxes[gateway], orphans

    def detach(self, gateway: str, outbox: Outbox) -> list[str]:
        """The stream of this outbox has ended. The requests nobody waits for any more; none when the gateway has attached anew meanwhile."""
        if self._boxes.get(gateway) is not outbox:
            return []
        del self._boxes[gateway]
        return self._forget(gateway)

    def renew(self, gateway: str, now: float) -> None:
        """The gateway lives."""
        if (box := self._boxes.get(gateway)) is not None:
            box.renewed_at = now

    def own(self, request_id: str, gateway: str) -> bool:
        """Events of the request go to this gateway from now on. False when the gateway is not attached."""
        if gateway not in self._boxes:
            return False
        self._owners[request_id] = gateway
        return True

    def disown(self, request_id: str) -> None:
        """The request was not taken after all."""
        self._owners.pop(request_id, None)

    def deliver(self, events: tuple[TokenEvent, ...]) -> None:
        """Sort the events of some rounds to their gateways; `notify_all` follows."""
        for event in events:
            gateway = self._owners.get(event.request_id)
            if event.finish is not None:
                self._owners.pop(event.request_id, None)
            if gateway is not None:
                self._boxes[gateway].put(event)

    def notify_all(self) -> None:
        """A round has ended: each gateway gets the events of its requests and the load."""
        for box in self._boxes.values():
            box.notify()

    def _forget(self, gateway: str) -> list[str]:
        orphans = [request_id for request_id, owner in self._owners.items() if owner == gateway]
        for request_id in orphans:
            del self._owners[request_id]
        return orphans
