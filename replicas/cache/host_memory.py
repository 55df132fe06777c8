"""How many blocks the host tier gets, decided before any weight is read, or a refusal with the numbers. Knows files of the kernel, no tensors."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from espalier.replicas.config import EngineConfig
from espalier.replicas.control_groups import group_folders
from espalier.replicas.errors import InvalidRequestError

_GIB = 2**30
# For all else that the process still takes after the plan.
_HEADROOM_BYTES = _GIB
# Below the control group's folder: the limit, what is in use, and in memory.stat the names of file pages, which are given up when need be.
_FILES_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
_FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Memory that this process can still take: what the machine has available, or the least that its control groups leave, if that is less.

    root: of the file system that /proc and /sys are in; where they are not, it is all memory of the machine.
    """
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return min([machine, *_left_by_groups(root)])


def plan_host_slots(
    config: EngineConfig, block_bytes: int, *, kv_bytes: int = 0, available: Callable[[], int] = available_memory_bytes
) -> int:
    """Blocks of `block_bytes` in host_kv_gb; 0 without a host tier, and then nothing is asked.

    kv_bytes: what the blocks of a CPU's own cache take when all are used. available: bytes that this process can still take.
    Raises InvalidRequestError naming host_kv_gb, with GiB of each part, when it holds no block or does not fit in what is available.
    """
    if config.host_kv_gb == 0:
        return 0
    wanted = int(config.host_kv_gb * _GIB)
    if wanted < block_bytes:
        message = f"host_kv_gb: {config.host_kv_gb:g} GiB hold no block of {block_bytes} bytes"
        raise InvalidRequestError(message, param="host_kv_gb")
    available_bytes = available()
    if wanted + kv_bytes + _HEADROOM_BYTES > available_bytes:
        raise InvalidRequestError(
            f"host_kv_gb: {config.host_kv_gb:g} GiB do not fit: with KV blocks in host memory {_gib(kv_bytes)} and "
            f"{_gib(_HEADROOM_BYTES)} for the rest of the process they are {_gib(wanted + kv_bytes + _HEADROOM_BYTES)} GiB, and "
            f"{_gib(available_bytes)} are available to this process",
            param="host_kv_gb",
        )
    return wanted // block_bytes


def _left_by_groups(root: Path) -> Iterator[int]:
    """Of every group that has a limit."""
    for version, folder in group_folders(root, "memory"):
        limit, used, file_pages = _FILES_V2 if version == 2 else _FILES_V1
        try:
            limit_text = (folder / limit).read_text(encoding="ascii").strip()
            used_bytes = int((folder / used).read_text(encoding="ascii"))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        except OSError:  # not seen from inside a container, or the first group, which has no limit
            continue
        if limit_text.isdigit():
            yield int(limit_text) - used_bytes + sum(int(stat.get(name, 0)) for name in file_pages)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f}"
