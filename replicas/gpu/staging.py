"""Tensors of safetensors files -> memory of a device, group by group: threads read ahead while earlier bytes are copied and used.

Knows files and bytes, nothing of what the tensors are for. Reading is what takes time, so several threads do it, each into a pinned buffer of
its own; a full buffer goes to the device in one copy, on the stream that the caller works on. That order makes the memory of a group free
for the next one as soon as it is let go, with no wait in between.
"""

import contextlib
import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from espalier.replicas.errors import CheckpointError
from espalier.replicas.model.headers import DTYPES, TensorEntry

# Buffers, each with a thread that reads into it, and their size: 256 MiB of pinned memory.
NUM_BUFFERS = 8
BUFFER_BYTES = 32 << 20
# Of each tensor inside its group's memory.
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes of a tensor, from `first` of its file on, to be laid at [start, stop) of a chunk."""

    entry: TensorEntry
    first: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Bytes [begin, end) of a group's memory: what one buffer takes at a time."""

    begin: int
    end: int
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """Where each tensor begins in its group's memory, and how that is filled."""

    places: tuple[tuple[TensorEntry, int], ...]
    num_bytes: int
    chunks: tuple[_Chunk, ...]


class _Buffer:
    """Host memory that is read into, and copied from when it is full."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._bytes = self._memory.numpy().data
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._device = device

    def fill(self, chunk: _Chunk, files: dict[Path, int]) -> None:
        """Reads a chunk, when what was here before has been copied. Raises CheckpointError naming the tensor."""
        if self._copied is not None:
            self._copied.synchronize()
        for piece in chunk.pieces:
            _read(files[piece.entry.file], piece, self._bytes[piece.start : piece.stop])

    def copy_to(self, target: Tensor) -> None:
        """Starts the copy of the chunk that was read last."""
        target.copy_(self._memory[: len(target)], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))


def read_groups(groups: Sequence[Sequence[TensorEntry]], device: torch.device) -> Generator[dict[str, Tensor]]:
    """Each group's tensors by name, on the device, in the order of the groups.

    The tensors of a group lie in one allocation: whoever keeps one keeps the whole group's memory. On a GPU they are ready for the device's
    current stream. On "meta" nothing is read, and they have no memory. Close the iterator when it is not run to its end.
    Raises CheckpointError naming file and tensor when a file cannot be read or ends early.
    """
    if device.type == "meta":
        for group in groups:
            yield {entry.name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device=device) for entry in group}
        return
    plans = [_lay_out(group) for group in groups]
    chunks = [chunk for plan in plans for chunk in plan.chunks]
    size = max((chunk.end - chunk.begin for chunk in chunks), default=0)
    buffers = [_Buffer(size, device) for _ in range(min(NUM_BUFFERS, len(chunks)))]
    with _open_files(groups) as files, _Readers(len(buffers)) as pool:
        reads = [pool.submit(buffer.fill, chunk, files) for buffer, chunk in zip(buffers, chunks, strict=False)]
        done = 0
        for plan in plans:
            memory = torch.empty(plan.num_bytes, dtype=torch.uint8, device=device)
            for chunk in plan.chunks:
                place = done % len(buffers)
                reads[place].result()
                buffers[place].copy_to(memory[chunk.begin : chunk.end])
                if done + len(buffers) < len(chunks):
                    reads[place] = pool.submit(buffers[place].fill, chunks[done + len(buffers)], files)
                done += 1
            yield {entry.name: _view(memory, entry, start) for entry, start in plan.places}
            del memory  # so that it is the caller alone who keeps it


class _Readers(ThreadPoolExecutor):
    """Threads that, when their user ends early, finish what they read and begin nothing more."""

    def __init__(self, count: int) -> None:
        super().__init__(max(1, count), thread_name_prefix="reader")

    def __exit__(self, *error: object) -> None:
        self.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _open_files(groups: Sequence[Sequence[TensorEntry]]) -> Iterator[dict[Path, int]]:
    """Every file once, as a descriptor that threads share: reads say where they begin."""
    with contextlib.ExitStack() as opened:
        files: dict[Path, int] = {}
        for file in sorted({entry.file for group in groups for entry in group}):
            try:
                files[file] = os.open(file, os.O_RDONLY)
            except OSError as e:
                raise CheckpointError(f"{file}: cannot be read: {e.strerror}") from e
            opened.callback(os.close, files[file])
        yield files


def _lay_out(group: Sequence[TensorEntry]) -> _Group:
    places: list[tuple[TensorEntry, int]] = []
    end = 0
    for entry in group:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        places.append((entry, start))
        end = start + entry.end - entry.begin
    chunks = tuple(_chunk(places, begin, min(begin + BUFFER_BYTES, end)) for begin in range(0, end, BUFFER_BYTES))
    return _Group(tuple(places), end, chunks)


def _chunk(places: Sequence[tuple[TensorEntry, int]], begin: int, end: int) -> _Chunk:
    pieces = []
    for entry, start in places:
        first, last = max(start, begin), min(start + entry.end - entry.begin, end)
        if first < last:
            pieces.append(_Piece(entry, entry.begin + first - start, first - begin, last - begin))
    return _Chunk(begin, end, tuple(pieces))


def _read(file: int, piece: _Piece, target: memoryview) -> None:
    done = 0
    while done < len(target):
        try:
            count = os.preadv(file, [target[done:]], piece.first + done)
        except OSError as e:
            raise piece.entry.error(f"cannot be read: {e.strerror}") from e
        if count == 0:
            raise piece.entry.error(
                f"truncated file: it ends at byte {piece.first + done}, the tensor at {piece.entry.end}"
            )
        done += count


def _view(memory: Tensor, entry: TensorEntry, start: int) -> Tensor:
    raw = memory[start : start + entry.end - entry.begin]
    return raw.view(DTYPES[entry.dtype]).view(entry.shape)
