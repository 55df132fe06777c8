"""A folder held by one process at a time. The kernel drops the lock when its holder ends, however it ends."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def held(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold `folder`, which must exist, against other processes and other callers in this one.

    wait: until it is free; else BlockingIOError when somebody holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)
