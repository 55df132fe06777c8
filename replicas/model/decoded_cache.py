"""Decoded weights in one file, made once and mapped by every process that serves them. Knows named fp32 arrays, not models.

The first page of a file is a JSON header with the layout and a crc32 of the rest; a file whose header or content does not match is made
again, never trusted. It is written beside its final name and moved there whole, under a lock that other processes wait for.
"""

import contextlib
import fcntl
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espalier.replicas.errors import InvalidRequestError

_HEADER_BYTES = 4096
_ALIGNMENT = 4096  # of every array: BLAS may choose its code by alignment, and pages are shared whole
_VERSION = 1

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Decoded:
    """arrays: by name, mapped from the file. crc32: of the file's content, the same wherever the same numbers were decoded."""

    arrays: dict[str, Tensor]
    crc32: int


def open_decoded(folder: Path, stem: str, key: str, shapes: Shapes, fill: Callable[[str, Tensor], None]) -> Decoded:
    """Arrays of these shapes, mapped from `folder`/`stem`-`key`.f32; `fill` writes them when there is no sound file.

    fill(name, out): must write all of `out`, fp32 of the named shape. key: names the content; files of the same stem with other keys are
    removed, being of weights that are no more. The tensors are private to this process if written to (nobody should).
    Raises InvalidRequestError when the folder cannot be written.
    """
    file = folder / f"{stem}-{key}.f32"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{stem}.lock"):
            crc = _sound_crc(file, shapes)
            if crc is None:
                crc = _write(file, shapes, fill)
                for other in folder.glob(f"{stem}-*.f32"):
                    if other != file:
                        other.unlink(missing_ok=True)
            return Decoded(_map(file, shapes), crc)
    except OSError as e:
        raise InvalidRequestError(
            f"cache_dir: decoded weights cannot be kept in {file}: {e.strerror}", param="cache_dir"
        ) from e


@contextlib.contextmanager
def _locked(lock_file: Path) -> Iterator[None]:
    with lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _offsets(shapes: Shapes) -> tuple[dict[str, int], int]:
    """Byte offset of each array, and the size of the file."""
    offsets, end = {}, _HEADER_BYTES
    for name, shape in shapes.items():
        offsets[name] = end
        end += -(-math.prod(shape) * 4 // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def _header(shapes: Shapes, crc: int) -> bytes:
    layout = zlib.crc32(json.dumps(list(shapes.items())).encode())
    return json.dumps({"version": _VERSION, "layout": layout, "crc32": crc}).encode().ljust(_HEADER_BYTES)


def _sound_crc(file: Path, shapes: Shapes) -> int | None:
    """The content's crc32 if the file is what its header says, for these shapes; None if there is no such file."""
    if not file.exists() or file.stat().st_size != _offsets(shapes)[1]:
        return None
    content = np.memmap(file, dtype=np.uint8, mode="r")
    crc = zlib.crc32(content.data[_HEADER_BYTES:])
    return crc if bytes(content[:_HEADER_BYTES]) == _header(shapes, crc) else None


def _write(file: Path, shapes: Shapes, fill: Callable[[str, Tensor], None]) -> int:
    offsets, size = _offsets(shapes)
    unfinished = file.with_suffix(f".{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as stream:
            # A full disk is an error here; later, on a mapped page, it would be a signal.
            os.posix_fallocate(stream.fileno(), 0, size)
        content = np.memmap(unfinished, dtype=np.uint8, mode="r+")
        for name, tensor in _views(content, shapes, offsets).items():
            fill(name, tensor)
        crc = zlib.crc32(content.data[_HEADER_BYTES:])
        content[:_HEADER_BYTES] = np.frombuffer(_header(shapes, crc), dtype=np.uint8)
        content.flush()
        os.replace(unfinished, file)
        return crc
    finally:
        unfinished.unlink(missing_ok=True)


def _map(file: Path, shapes: Shapes) -> dict[str, Tensor]:
    offsets, _ = _offsets(shapes)
    # Copy-on-write: pages stay shared with other processes, and torch gets the writable memory it asks for.
    return _views(np.memmap(file, dtype=np.uint8, mode="c"), shapes, offsets)


def _views(
    content: "np.memmap[Any, np.dtype[np.uint8]]", shapes: Shapes, offsets: Mapping[str, int]
) -> dict[str, Tensor]:
    raw = torch.from_numpy(content)
    return {
        name: raw[offsets[name] : offsets[name] + math.prod(shape) * 4].view(torch.float32).view(shape)
        for name, shape in shapes.items()
    }
