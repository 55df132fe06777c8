"""Finds the processes of engine replicas below one of ours, by the titles that Ray gives them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


def engine_pids(parent: int) -> list[int]:
    """Processes of the engine replicas that `parent` or its children have started."""
    return sorted(pid for pid in _descendants(parent) if "ServeReplica:espalier-engine" in _title(pid))


def _title(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def _descendants(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from _descendants(int(child))
