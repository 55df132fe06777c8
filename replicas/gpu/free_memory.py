"""How much of a device is free, once what ended processes held has been given back. Knows no model and no plan."""

import time
from collections.abc import Callable

# A killed process's memory comes back in a second or two; what does not change for so long is somebody's.
_UNCHANGED_S = 3.0
_PATIENCE_S = 30.0
_POLL_S = 0.25


def settled_memory(
    measure: Callable[[], tuple[int, int]],
    share: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[int, int]:
    """(free, total) bytes as `measure` gives them: at once where `share` of the device is free, else when they have stopped changing.

    So the successor of a replica that was killed plans with the memory that its predecessor leaves, not with what is free meanwhile.
    """
    free_bytes, total_bytes = measure()
    began = since = clock()
    while free_bytes < int(total_bytes * share) and clock() - since < _UNCHANGED_S and clock() - began < _PATIENCE_S:
        sleep(_POLL_S)
        before, (free_bytes, total_bytes) = free_bytes, measure()
        if free_bytes != before:
            since = clock()
    return free_bytes, total_bytes
