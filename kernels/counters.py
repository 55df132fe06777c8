"""The contract of device memory that launches share: counters are zero on entry and zero again on exit; partial sums may hold anything.

The last programs of a split product to arrive at an output block add the partial sums and write its counter back to 0, so nobody clears
counters between calls. Two launches that may run at the same time must not share a `Scratch`: one per CUDA stream. A launcher says what it
needs as a `ScratchSize`; who owns the memory, and when it grows, is not known here (`replicas/streams/counters.py`).
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ScratchSize:
    """What a launch needs: `counters` int32 and `partials` fp32 elements."""

    counters: int = 0
    partials: int = 0

    def __or__(self, other: "ScratchSize") -> "ScratchSize":
        """Enough for either of two launches that follow each other."""
        return ScratchSize(max(self.counters, other.counters), max(self.partials, other.partials))


@dataclass(frozen=True, slots=True)
class Scratch:
    """counters: int32 [n], zeros between launches. partials: fp32 [m], uninitialized, 16-byte aligned."""

    counters: Tensor
    partials: Tensor

    def require(self, size: ScratchSize) -> None:
        """A launch that was not reserved for is our own mistake: it must never grow memory by itself."""
        assert self.counters.numel() >= size.counters, (
            f"{size.counters} counters needed, {self.counters.numel()} reserved"
        )
        assert self.partials.numel() >= size.partials, (
            f"{size.partials} partials needed, {self.partials.numel()} reserved"
        )
