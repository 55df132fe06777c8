"""When the device worked: intervals of kernels and copies from a profiler's trace, and arithmetic on them. Pure; knows no kernel.

Times are microseconds. Kernels overlap where one begins before the one it depends on has ended, so durations add up to more than the device
worked; `own_times` shares the time out instead, each moment to the kernel that was the first to want it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Categories of the trace's events in which a device works.
_KERNEL = "kernel"
_COPIES = ("gpu_memcpy", "gpu_memset")


@dataclass(frozen=True, slots=True, order=True)
class Work:
    """A kernel's or copy's time on the device. is_copy: copies and fills of memory."""

    start: float
    end: float
    name: str
    is_copy: bool = False


def work_of(trace: Mapping[str, Any]) -> list[Work]:
    """All work in a trace as torch.profiler exports it, in the order in which it began."""
    return sorted(
        Work(float(event["ts"]), float(event["ts"]) + float(event["dur"]), event["name"], event["cat"] != _KERNEL)
        for event in trace["traceEvents"]
        if event.get("cat") == _KERNEL or event.get("cat") in _COPIES
    )


def union(work: Sequence[Work]) -> float:
    """How long at least one of them ran."""
    return sum(own_times(work))


def span(work: Sequence[Work]) -> float:
    """From the first begin to the last end."""
    return max(item.end for item in work) - min(item.start for item in work) if work else 0.0


def own_times(work: Sequence[Work]) -> list[float]:
    """For each, in order of their begins: how long it ran after all before it had ended. They sum up to the union."""
    own, done = [], float("-inf")
    for item in work:
        own.append(max(0.0, item.end - max(item.start, done)))
        done = max(done, item.end)
    return own


def gaps(work: Sequence[Work]) -> list[float]:
    """For each but the first, in order of their begins: how long nothing ran before it."""
    found: list[float] = []
    done = work[0].end if work else 0.0
    for item in work[1:]:
        found.append(max(0.0, item.start - done))
        done = max(done, item.end)
    return found


def split_at(work: Sequence[Work], first: str) -> list[list[Work]]:
    """Parts that each begin with work of this name. What comes before the first of them is left out."""
    parts: list[list[Work]] = []
    for item in work:
        if item.name == first:
            parts.append([])
        if parts:
            parts[-1].append(item)
    return parts
