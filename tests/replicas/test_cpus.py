"""CPUs that a process may use, from made-up control groups."""

import os
from pathlib import Path

import pytest

from espalier.replicas.cpus import usable_cpus

CORES = len(os.sched_getaffinity(0))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = "0::/pod/container\n"
V1 = "5:memory:/pod\n4:cpu,cpuacct:/pod\n"
ONE = {"sys/fs/cgroup/pod/container/cpu.max": "150000 100000\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, CORES),
        ({"proc/self/cgroup": V2}, CORES),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n"}, CORES),
        ({"proc/self/cgroup": V2} | ONE, 1),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/pod/cpu.max": "100000 100000\n"}, 1),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "99900000 100000\n"}, CORES),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000\n"}, CORES),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us": "100000\n", "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)  # fmt: skip
def test_the_least_that_some_group_allots(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    assert usable_cpus(write(tmp_path, files)) == expected


def test_of_this_machine() -> None:
    assert 1 <= usable_cpus() <= CORES
