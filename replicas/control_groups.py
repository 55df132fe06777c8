"""Folders of this process's control groups, version 1 and 2. Knows what a kernel lays out, not what its files say."""

from collections.abc import Iterator
from pathlib import Path


def group_folders(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """(version, folder) of every group from this process's own up to the first, as far as they are seen from here; some may not exist.

    root: of the file system that /proc and /sys are in. controller: "cpu" or "memory", which version 1 keeps apart.
    """
    try:
        memberships = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from ((2, folder) for folder in _upwards(mount, path))
        elif controller in controllers.split(","):
            yield from ((1, folder) for folder in _upwards(mount / controller, path))


def _upwards(mount: Path, path: str) -> list[Path]:
    own = mount / path.lstrip("/")
    return [own, *(parent for parent in own.parents if parent.is_relative_to(mount))]
