"""safetensors files, read by our own hands: headers checked whole before any tensor is, tensors at any byte alignment.

Knows the file format and nothing of models. Holes between tensors are allowed, overlaps are not.
"""

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from espalier.replicas.errors import CheckpointError

_MAX_HEADER_BYTES = 100_000_000
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: bytes [begin, end) of `file`, as the header says. dtype keeps the header's spelling."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def error(self, message: str) -> CheckpointError:
        """A CheckpointError that names file and tensor."""
        return CheckpointError(f"{self.file}: {self.name}: {message}")

    def bytes(self) -> "np.memmap[Any, np.dtype[np.uint8]]":
        """The raw bytes, mapped copy-on-write: pages are shared with all who map the file, and torch takes the array."""
        return np.memmap(self.file, dtype=np.uint8, mode="c", offset=self.begin, shape=(self.end - self.begin,))

    def read(self) -> Tensor:
        """A copy of the tensor, aligned. The file may hold it at any byte."""
        raw = np.zeros(self.end - self.begin, dtype=np.uint8)
        if raw.size:
            raw[:] = self.bytes()
        return torch.from_numpy(raw).view(DTYPES[self.dtype]).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class FileHeader:
    """A checked file: its tensors by name, and the header's own bytes."""

    file: Path
    entries: dict[str, TensorEntry]
    raw: bytes


def read_header(file: Path) -> FileHeader:
    """Read and check one file's header. Raises CheckpointError naming the file, and the tensor if one is at fault."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8:
                raise CheckpointError(f"{file}: truncated: {size} bytes cannot hold a safetensors header")
            if 8 + length > size:
                raise CheckpointError(f"{file}: header of {length} bytes is longer than the file of {size}")
            if length > _MAX_HEADER_BYTES:
                raise CheckpointError(f"{file}: header of {length} bytes is longer than {_MAX_HEADER_BYTES}")
            raw = stream.read(length)
    except OSError as e:
        raise CheckpointError(f"{file}: cannot be read: {e.strerror}") from e
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=lambda pairs: _no_twins(file, pairs))
    except ValueError as e:
        raise CheckpointError(f"{file}: header is not JSON: {e}") from e
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: header must be a JSON object")
    header.pop("__metadata__", None)
    entries = {name: _entry(file, name, value, 8 + length, size) for name, value in header.items()}
    _refuse_overlaps(entries)
    return FileHeader(file, entries, raw)


def _no_twins(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"{file}: {twin}: named twice in the header")
    return values


def _entry(file: Path, name: str, value: Any, data_start: int, file_size: int) -> TensorEntry:
    def error(message: str) -> CheckpointError:
        return CheckpointError(f"{file}: {name}: {message}")

    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= value.keys():
        raise error("header entry must have dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        raise error(f"dtype {dtype!r} is not a name")
    if not _are_sizes(shape):
        raise error(f"shape {shape!r} is not a list of sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise error(f"data_offsets {offsets!r} are not two ascending offsets")
    begin, end = data_start + offsets[0], data_start + offsets[1]
    if end > file_size:
        raise error(f"truncated file: its data ends at byte {end}, the file at {file_size}")
    # Tensors of types unknown here are somebody else's; only their place is checked.
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise error(f"{dtype} {shape} does not fill its {end - begin} bytes")
    return TensorEntry(file, name, dtype, tuple(shape), begin, end)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)


def _refuse_overlaps(entries: dict[str, TensorEntry]) -> None:
    in_order = sorted((e for e in entries.values() if e.end > e.begin), key=lambda e: (e.begin, e.end))
    for before, after in itertools.pairwise(in_order):
        if after.begin < before.end:
            raise after.error(f"overlaps {before.name}")
