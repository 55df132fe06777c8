"""How many CPUs this process may keep busy: what it may be scheduled on, or less where a control group allots time. Knows files of the kernel."""

import math
import os
from collections.abc import Iterator
from pathlib import Path


def usable_cpus(root: Path = Path("/")) -> int:
    """At least 1. root: of the file system that /proc and /sys are in.

    Threads beyond it only make each other wait: a container of 4 CPUs on a machine of 64 is seen as 64 by everything but its control group.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.floor, _allotted(root))]))


def _allotted(root: Path) -> Iterator[float]:
    """CPUs' worth of time, by every group from this process's own up to the first, as far as they are seen from here, that has a limit."""
    try:
        memberships = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for folder in _upwards(mount, path):
                yield from _ratio(_numbers(folder / "cpu.max"))
        elif "cpu" in controllers.split(","):
            for folder in _upwards(mount / "cpu", path):
                yield from _ratio(_numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us"))


def _upwards(mount: Path, path: str) -> list[Path]:
    own = mount / path.lstrip("/")
    return [own, *(parent for parent in own.parents if parent.is_relative_to(mount))]


def _numbers(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").split()
    except OSError:  # not seen from inside a container, or the first group, which has no limit
        return []


def _ratio(quota_and_period: list[str]) -> Iterator[float]:
    match quota_and_period:
        case [quota, period] if quota.isdigit() and int(period) > 0:  # else "max", or -1: no limit
            yield int(quota) / int(period)
