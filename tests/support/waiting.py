"""Waits for a condition, with a bound."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30, poll_s: float = 0.05) -> None:
    """Fails the test when the condition does not come true in time."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"waited {timeout_s} s until {what}"
        time.sleep(poll_s)
