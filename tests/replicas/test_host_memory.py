"""How large the host tier may be: what this process can still take, its control groups included, or a refusal with the numbers."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from espalier.replicas.cache.host_memory import available_memory_bytes, plan_host_slots
from espalier.replicas.config import EngineConfig
from espalier.replicas.errors import InvalidRequestError

GIB = 2**30
CONFIG = EngineConfig(model_path=Path("none"), host_kv_gb=2.0)


def test_the_tier_is_as_large_as_it_is_told() -> None:
    assert plan_host_slots(CONFIG, 3 * 2**20, available=lambda: 4 * GIB) == 2 * GIB // (3 * 2**20)
    assert plan_host_slots(CONFIG, 2 * GIB, available=lambda: 3 * GIB) == 1
    assert plan_host_slots(replace(CONFIG, host_kv_gb=0.0), 3 * 2**20, available=lambda: 0) == 0


@pytest.mark.parametrize(
    ("block_bytes", "available", "kv_bytes", "said"),
    [
        (2 * GIB + 1, 64 * GIB, 0, "2 GiB hold no block of 2147483649 bytes"),
        (2**20, 3 * GIB - 1, 0, "they are 3.00 GiB, and 3.00 are available"),
        (
            2**20,
            11 * GIB,
            8 * GIB + 1,
            "KV blocks in host memory 8.00 and 1.00 for the rest of the process they are 11.00 GiB",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_numbers(block_bytes: int, available: int, kv_bytes: int, said: str) -> None:
    with pytest.raises(InvalidRequestError, match="host_kv_gb: ") as caught:
        plan_host_slots(CONFIG, block_bytes, available=lambda: available, kv_bytes=kv_bytes)
    assert said in caught.value.message and caught.value.param == "host_kv_gb"


class Machine:
    """The files in which a kernel tells of memory, below a folder."""

    def __init__(self, root: Path, memberships: str, available_kib: int = 8 * 2**20) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
        self.write("proc/self/cgroup", memberships)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def group_v2(self, path: str, limit: str, used: int, inactive: int = 0, active: int = 0) -> None:
        self.write(f"sys/fs/cgroup{path}/memory.max", f"{limit}\n")
        self.write(f"sys/fs/cgroup{path}/memory.current", f"{used}\n")
        stat = f"anon 5\nfile 99\ninactive_file {inactive}\nactive_file {active}\n"
        self.write(f"sys/fs/cgroup{path}/memory.stat", stat)


def test_without_limits_it_is_what_the_machine_has(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/user.slice\n")
    assert available_memory_bytes(tmp_path) == 8 * GIB
    machine.group_v2("/user.slice", "max", 3 * GIB)
    assert available_memory_bytes(tmp_path) == 8 * GIB


def test_a_containers_limit_counts_less_what_it_uses_but_for_pages_of_files(tmp_path: Path) -> None:
    Machine(tmp_path, "0::/\n").group_v2("", str(6 * GIB), 3 * GIB, inactive=GIB // 2, active=GIB // 4)
    assert available_memory_bytes(tmp_path) == 6 * GIB - 3 * GIB + GIB // 2 + GIB // 4


def test_the_least_of_all_groups_above_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/pods/one/main\n")
    machine.group_v2("/pods/one/main", str(5 * GIB), 0)
    machine.group_v2("/pods/one", str(4 * GIB), 2 * GIB)
    machine.group_v2("/pods", "max", 7 * GIB)
    assert available_memory_bytes(tmp_path) == 2 * GIB


def test_a_group_that_is_not_seen_from_inside_is_passed_over(tmp_path: Path) -> None:
    Machine(tmp_path, "0::/kubepods/pod1/c1\n").group_v2("", str(GIB), 100)
    assert available_memory_bytes(tmp_path) == GIB - 100


def test_the_older_hierarchy(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "9:name=systemd:/\n4:cpuset,memory:/box\n0::/\n")
    machine.write("sys/fs/cgroup/memory/box/memory.limit_in_bytes", f"{2 * GIB}\n")
    machine.write("sys/fs/cgroup/memory/box/memory.usage_in_bytes", f"{GIB}\n")
    machine.write("sys/fs/cgroup/memory/box/memory.stat", "cache 7\ntotal_inactive_file 10\ntotal_active_file 20\n")
    assert available_memory_bytes(tmp_path) == GIB + 30


def test_elsewhere_it_is_all_memory_there_is(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_here() -> None:
    assert available_memory_bytes() > 2**27
