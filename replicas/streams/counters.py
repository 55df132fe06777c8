"""CounterPool: the device memory that launches of one CUDA stream share (`kernels/counters.py` has the contract). Knows no kernel.

Counters are zeroed when the pool grows and never again: every launch leaves them at zero. A pool grows in `reserve`, at load. From the
first captured graph on it never does, because graphs hold its addresses. A launch that died half way leaves a counter behind that would
spoil every later sum, or keep it waiting: `check` finds it. One pool belongs to one stream and to the thread that launches there.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels.counters import Scratch, ScratchSize

COUNTER_BYTES = 4
PARTIAL_BYTES = 4
ALIGNMENT = 256  # bytes; where partials begin

Allocate = Callable[[int, torch.device], Tensor]  # (bytes, device) -> uint8 [bytes], uninitialized
Zero = Callable[[Tensor], object]


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """A pool's exported figures. num_bytes: of device memory. growths: times memory was taken. poison_resets: times `check` had to zero."""

    num_bytes: int
    growths: int
    poison_resets: int


def _allocate(num_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class CounterPool:
    """Counters and partial sums for the launches of `stream`; None: a CPU's stand-in.

    allocate, zero: how memory is had and cleared, called on the stream, each once a growth.
    """

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        *,
        allocate: Allocate = _allocate,
        zero: Zero = Tensor.zero_,
    ) -> None:
        if (device.type == "cuda") != (stream is not None):
            raise ValueError(f"stream: a pool on {device} {'needs one' if stream is None else 'has none'}")
        self.device = device
        self.stream = stream
        self._allocate = allocate
        self._zero = zero
        self._sealed = False
        self._size = ScratchSize()
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._scratch = _carve(self._buffer, self._size)
        self._growths = 0
        self._poison_resets = 0

    @property
    def size(self) -> ScratchSize:
        """What the pool can serve."""
        return self._size

    @property
    def scratch(self) -> Scratch:
        """For launches on the stream. Taken inside a capture, it seals the pool: the graph will hold its addresses."""
        self._sealed = self._sealed or self._capturing()
        return self._scratch

    @property
    def figures(self) -> PoolFigures:
        """As of now."""
        return PoolFigures(self._buffer.numel(), self._growths, self._poison_resets)

    def reserve(self, size: ScratchSize) -> Scratch:
        """Makes room for launches of `size`, beside what was reserved before; a Scratch taken earlier is no longer valid when it grows.

        Raises RuntimeError inside a capture, where nothing may be allocated or cleared, and for growth of a sealed pool.
        """
        if self._capturing():
            raise RuntimeError(f"reserve({size}) inside a CUDA graph capture; reserve before it")
        wanted = self._size | size
        if wanted != self._size:
            if self._sealed:
                raise RuntimeError(
                    f"reserve({size}): graphs hold this pool's memory, which is {self._size} and cannot move"
                )
            self._grow(wanted)
        return self._scratch

    def seal(self) -> None:
        """From here on the memory stays where it is: a graph that uses it was or will be captured."""
        self._sealed = True

    def check(self) -> bool:
        """Whether all counters are zero, as of the launches enqueued so far; clears them, and counts that, when not.

        Waits for the stream. Call it after a launch failed, and when it is quiet. Raises RuntimeError inside a capture.
        """
        if self._capturing():
            raise RuntimeError("check() inside a CUDA graph capture")
        with torch.cuda.stream(self.stream):
            clean = not bool(self._scratch.counters.any())
            if not clean:
                self._zero(self._scratch.counters)
                self._poison_resets += 1
        return clean

    def _grow(self, size: ScratchSize) -> None:
        # On the stream: launches enqueued before use the old memory, which the allocator hands on in the stream's own order.
        with torch.cuda.stream(self.stream):
            self._buffer = self._allocate(_partials_offset(size) + size.partials * PARTIAL_BYTES, self.device)
            self._scratch = _carve(self._buffer, size)
            self._zero(self._scratch.counters)
        self._size = size
        self._growths += 1

    def _capturing(self) -> bool:
        return self.stream is not None and torch.cuda.is_current_stream_capturing()


def _partials_offset(size: ScratchSize) -> int:
    return -(-size.counters * COUNTER_BYTES // ALIGNMENT) * ALIGNMENT


def _carve(buffer: Tensor, size: ScratchSize) -> Scratch:
    counters = buffer[: size.counters * COUNTER_BYTES].view(torch.int32)
    return Scratch(counters, buffer[_partials_offset(size) :].view(torch.float32))
