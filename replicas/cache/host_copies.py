"""HostCopies: the host tier's memory, and the copies between it and the blocks of a device. Knows no keys, no sequences and no steps.

Blocks move as integers, so every bit arrives. On a GPU the copies of all tracks go one after the other over a stream of their own, beside rounds
that do not touch their blocks; a round that does waits for `made`. Nothing here waits for the device.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from espalier.replicas.cache.tier import BlockCopy
from espalier.replicas.errors import InvalidRequestError

_STAGING_BYTES = 64 << 20
# Pinned memory is had in powers of two: slots lie in parts of so many bytes, lest the last of one large piece be wasted.
_PART_BYTES = 256 << 20


def blocks_view(kv: Tensor) -> Tensor:
    """The whole state of each block: int64 [blocks, 2 * layers, words], a view of keys and values [2, layers, blocks, ...]."""
    kinds, layers, blocks = kv.shape[:3]
    return kv.view(kinds * layers, blocks, -1).view(torch.int64).transpose(0, 1)


def staging_bytes(block_bytes: int, num_slots: int) -> int:
    """Of the device's memory, for a tier of so many slots."""
    return _num_staged(block_bytes, num_slots) * block_bytes


class HostCopies:
    """num_slots slots of a block each. blocks: as `blocks_view` makes them; one of them, `idle_block`, is read and written at load, unchanged.
    Raises InvalidRequestError naming host_kv_gb where a GPU's driver pins no more memory.

    made: on a GPU, the event after all copies that were enqueued so far.
    """

    def __init__(self, blocks: Tensor, num_slots: int, idle_block: int) -> None:
        device, shape = blocks.device, blocks.shape[1:]
        block_bytes = math.prod(shape) * blocks.itemsize
        self._blocks = blocks
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.made = None if self._stream is None else torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._part_slots = max(1, _PART_BYTES // block_bytes)
        self._parts = [
            self._host_memory((min(self._part_slots, num_slots - first), *shape))
            for first in range(0, num_slots, self._part_slots)
        ]
        num_staged = _num_staged(block_bytes, num_slots)
        self._staging = torch.empty((num_staged, *shape), dtype=torch.int64, device=device)
        self._index = torch.empty(num_staged, dtype=torch.int64, device=device)
        self._failure: Exception | None = None
        if self._stream is not None:  # what the first copies would load is loaded now
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self.run([BlockCopy(idle_block, 0, restores=False), BlockCopy(idle_block, 0, restores=True)])
            self._stream.synchronize()

    def run(self, copies: Sequence[BlockCopy]) -> None:
        """Makes copies in their order; on a GPU, enqueues them. When one fails, this and every later call raise."""
        if self._failure is not None:
            raise RuntimeError(f"an earlier copy of blocks failed: {self._failure}")
        if not copies:
            return
        try:
            with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                for batch in _batches(copies, len(self._staging)):
                    (self._restore if batch[0].restores else self._save)(batch)
                if self.made is not None:
                    self.made.record()
        except Exception as error:
            self._failure = error
            raise

    def _save(self, batch: Sequence[BlockCopy]) -> None:
        staged = self._staging[: len(batch)]
        torch.index_select(self._blocks, 0, self._block_ids(batch), out=staged)
        for first, slots in self._runs(batch):
            slots.copy_(staged[first : first + len(slots)], non_blocking=True)

    def _restore(self, batch: Sequence[BlockCopy]) -> None:
        assert len({copy.block_id for copy in batch}) == len(batch), "a block is restored twice at once"
        staged = self._staging[: len(batch)]
        for first, slots in self._runs(batch):
            staged[first : first + len(slots)].copy_(slots, non_blocking=True)
        self._blocks.index_copy_(0, self._block_ids(batch), staged)

    def _block_ids(self, batch: Sequence[BlockCopy]) -> Tensor:
        """On the device. Pinned memory that a copy still reads is not given to others, so it may be let go at once."""
        block_ids = torch.tensor(
            [copy.block_id for copy in batch], dtype=torch.int64, pin_memory=self._stream is not None
        )
        return self._index[: len(batch)].copy_(block_ids, non_blocking=True)

    def _runs(self, batch: Sequence[BlockCopy]) -> Iterator[tuple[int, Tensor]]:
        """Slots that lie one after the other in memory, with the place in the batch of the first of them."""
        first = 0
        for index in range(1, len(batch) + 1):
            slot = batch[first].slot
            part, place = divmod(slot, self._part_slots)
            if (
                index == len(batch)
                or batch[index].slot != slot + index - first
                or batch[index].slot // self._part_slots != part
            ):
                yield first, self._parts[part][place : place + index - first]
                first = index

    def _host_memory(self, shape: tuple[int, ...]) -> Tensor:
        """Pinned for a GPU; else memory that is taken when it is first written."""
        if self._stream is None:
            return torch.from_numpy(np.zeros(shape, dtype=np.int64))
        try:
            return torch.empty(shape, dtype=torch.int64, pin_memory=True)
        except RuntimeError as error:  # a limit that no file tells of
            message = f"host_kv_gb: {8 * math.prod(shape)} bytes more cannot be pinned: {error}"
            raise InvalidRequestError(message, param="host_kv_gb") from error


def _num_staged(block_bytes: int, num_slots: int) -> int:
    return min(num_slots, max(1, _STAGING_BYTES // block_bytes))


def _batches(copies: Sequence[BlockCopy], size: int) -> Iterator[list[BlockCopy]]:
    """Copies in one direction that follow each other, at most `size`."""
    for _, group in itertools.groupby(copies, key=lambda copy: copy.restores):
        following = list(group)
        for first in range(0, len(following), size):
            yield following[first : first + size]
