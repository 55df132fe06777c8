"""How many CPUs this process may keep busy: what it may be scheduled on, or less where a control group allots time. Knows files of the kernel."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from espalier.replicas.control_groups import group_folders


def usable_cpus(root: Path = Path("/")) -> int:
    """At least 1. root: of the file system that /proc and /sys are in.

    Threads beyond it only make each other wait: a container of 4 CPUs on a machine of 64 is seen as 64 by everything but its control group.
    """
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.floor, _allotted(root))]))


def _allotted(root: Path) -> Iterator[float]:
    """CPUs' worth of time, by every group that has a limit."""
    for version, folder in group_folders(root, "cpu"):
        if version == 2:
            yield from _ratio(_numbers(folder / "cpu.max"))
        else:
            yield from _ratio(_numbers(folder / "cpu.cfs_quota_us") + _numbers(folder / "cpu.cfs_period_us"))


def _numbers(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="ascii").split()
    except OSError:  # not seen from inside a container, or the first group, which has no limit
        return []


def _ratio(quota_and_period: list[str]) -> Iterator[float]:
    match quota_and_period:
        case [quota, period] if quota.isdigit() and int(period) > 0:  # else "max", or -1: no limit
            yield int(quota) / int(period)
