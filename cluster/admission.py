"""Admission: how many requests the gateway holds at once, and when one that is refused should come again. Knows no clock and no Ray."""

import math
from collections import deque

from espalier.replicas.errors import InvalidRequestError, QueueFullError

RECENT = 32
MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0


class Admission:
    """Counts accepted choices; one call takes as many places as it has choices. Times are seconds on any one clock."""

    def __init__(self, max_outstanding: int) -> None:
        self._max = max_outstanding
        self._ended: deque[float] = deque(maxlen=RECENT)
        self.outstanding = 0

    def admit(self, num_choices: int, now: float) -> None:
        """Take places for one call. Raises QueueFullError with a time to retry, InvalidRequestError when it can never fit."""
        if num_choices > self._max:
            raise InvalidRequestError(f"n: at most {self._max} choices are served at once", param="n")
        if self.outstanding + num_choices > self._max:
            raise QueueFullError(
                f"{self.outstanding} requests are in progress, at most {self._max} are accepted",
                retry_after_s=self.retry_after_s(now),
            )
        self.outstanding += num_choices

    def release(self, num_choices: int, now: float) -> None:
        """The call has ended, however it ended."""
        self.outstanding -= num_choices
        assert self.outstanding >= 0
        self._ended.extend([now] * num_choices)

    def retry_after_s(self, now: float) -> float:
        """Whole seconds until a place should be free: the mean time between the last ends, between 1 s and 60 s."""
        if len(self._ended) < 2:
            return MIN_RETRY_S
        per_end_s = (now - self._ended[0]) / len(self._ended)
        return float(math.ceil(min(max(per_end_s, MIN_RETRY_S), MAX_RETRY_S)))
