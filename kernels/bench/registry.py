"""What can be timed: every module of this folder that defines `cases()` is an op, and lists its `BenchCase`s. Knows no op and no clock.

A case names itself by labels and makes its inputs only when it is run, so listing needs no GPU. An op's module imports its kernels inside
`make`, and looks like this:

    def cases() -> list[BenchCase]:
        return [BenchCase("norm", {"width": width, "rows": rows}, functools.partial(_norm, width, rows)) for ...]

    def _norm(width: int, rows: int, inputs: Inputs) -> Workload:
        x = inputs.randn(rows, width)
        ...
        return Workload({"ours": Call(lambda _: rms_norm(x, w, out=out))}, num_bytes=2 * x.nbytes, flops=0)
"""

import fnmatch
import importlib
import pkgutil
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from espalier.kernels.counters import Scratch, ScratchSize

T = TypeVar("T")
Label = str | int | float

OURS, CUBLAS = (
    "ours",
    "cublas",
)  # names of calls: the op as it is dispatched; the library's dense product of the same shape
HARNESS = ("__main__", "limits", "peer", "registry", "report", "results", "runner", "summary", "warm")
PAST_L2 = 256 << 20  # bytes to go round before a set of inputs comes again: several times the L2 of any card


@dataclass(frozen=True, slots=True)
class Call:
    """run(i), 0 <= i < copies, enqueues the work with the i-th set of inputs: no allocation, no synchronization, capturable in a graph."""

    run: Callable[[int], object]
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """A case on a device.

    calls: by name, OURS first; then other forms of ours, then the library's. They are timed in turn, on equal terms.
    num_bytes: what a call of ours must move; for a linear its packed weights alone. flops: of the product, 2 * rows * in * out.
    power_bound: long and dense enough to reach the card's power limit; timed cool (pauses) and hot (none). Others are timed steady.
    """

    calls: Mapping[str, Call]
    num_bytes: int
    flops: int = 0
    power_bound: bool = False


@dataclass
class Inputs:
    """Makes tensors on one device, from one seed. `once` keeps what cases of one `shares` have in common: `begin` each case."""

    device: torch.device
    generator: torch.Generator = field(init=False)
    kept: dict[Hashable, Any] = field(default_factory=dict)
    shares: Hashable = None

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(0)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        """Standard normal numbers, rounded to `dtype`. Never time on zeros: they run faster."""
        return torch.randn(shape, device=self.device, generator=self.generator).to(dtype)

    def randint(self, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
        """Uniform integers from low to high - 1."""
        return torch.randint(low, high, shape, device=self.device, generator=self.generator, dtype=dtype)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        """An output."""
        return torch.empty(shape, device=self.device, dtype=dtype)

    def scratch(self, size: ScratchSize) -> Scratch:
        """Counters at zero and partials, of the size that a launcher asks for."""
        return Scratch(
            counters=torch.zeros(size.counters, dtype=torch.int32, device=self.device),
            partials=torch.empty(size.partials, dtype=torch.float32, device=self.device),
        )

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """make()'s result, the same for every case with this key that shares inputs."""
        if key not in self.kept:
            self.kept[key] = make()
        found: T = self.kept[key]
        return found

    def begin(self, case: "BenchCase") -> None:
        """Drops what `once` kept, unless this case shares it with the one before."""
        if case.shares is None or case.shares != self.shares:
            self.kept.clear()
            torch.cuda.empty_cache()
        self.shares = case.shares


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One row of a table.

    op: such as 'linear' or 'attention-decode'. labels: what tells cases of the op apart, most important first; numbers as numbers.
    make: allocates and returns the workload. shares: cases of equal `shares` run one after the other and share `Inputs.once`; weights,
    for all row counts.
    For a linear that the peer was timed on, labels are: in, out, rate, codebook, rows.
    """

    op: str
    labels: Mapping[str, Label]
    make: Callable[[Inputs], Workload]
    shares: Hashable = None

    @property
    def name(self) -> str:
        """As `case_name` spells it."""
        return case_name(self.op, self.labels)


def case_name(op: str, labels: Mapping[str, Label]) -> str:
    """'linear/in=5120,out=17408,rate=4,codebook=mul1,rows=8'"""
    return f"{op}/" + ",".join(f"{key}={written(value)}" for key, value in labels.items())


def written(value: Label) -> str:
    """4.0 is '4', 3.5 is '3.5'."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def copies_past_l2(num_bytes: int) -> int:
    """Sets of inputs of so many bytes each that a graph should go round: 1 to 16."""
    return max(1, min(16, -(-PAST_L2 // max(1, num_bytes))))


def all_cases() -> tuple[list[BenchCase], dict[str, str]]:
    """Cases of every op's module that can be imported, and the reason for each that cannot, by name."""
    package = importlib.import_module("espalier.kernels.bench")
    cases: list[BenchCase] = []
    broken: dict[str, str] = {}
    for name in sorted(found.name for found in pkgutil.iter_modules(package.__path__) if found.name not in HARNESS):
        try:
            cases += importlib.import_module(f"espalier.kernels.bench.{name}").cases()
        except Exception as error:  # one op that is broken must not hide the others
            broken[name] = f"{type(error).__name__}: {error}"
    return cases, broken


def select(cases: Iterable[BenchCase], patterns: Sequence[str], only: Mapping[str, Sequence[str]]) -> list[BenchCase]:
    """Cases whose name matches one of the patterns (a beginning, or with * and ?; none: all) and, for each label in `only`, one value."""
    return [case for case in cases if _matches(case.name, patterns) and _has(case.labels, only)]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(name.startswith(pattern) or fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _has(labels: Mapping[str, Label], only: Mapping[str, Sequence[str]]) -> bool:
    return all(key in labels and written(labels[key]) in values for key, values in only.items())
