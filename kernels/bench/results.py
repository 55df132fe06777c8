"""What a run of the benchmarks found, as plain data: to JSON and back. Knows neither clocks nor tables."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from espalier.kernels.bench.registry import Label

STEADY, COOL, HOT = "steady", "cool", "hot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One call of one case.

    call: its name in the workload. mode: steady (replayed without pauses, in turn with the case's other calls), cool (in turn, a pause
    before each) or hot (one call without pauses, for long enough to reach the power limit). us: median time of one call. spread: half
    the distance of the quartiles, over the median.
    """

    op: str
    labels: Mapping[str, Label]
    call: str
    mode: str
    us: float
    spread: float
    num_bytes: int
    flops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The device's ceilings, measured in the same run. copy_gb_s: bytes read plus written. product_tflop_s: cuBLAS, fp16, 8192^3, cool."""

    copy_gb_s: float
    product_tflop_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Timings and where they come from. failures: case -> why it has no timing."""

    device: str
    numerics_id: str
    torch: str
    triton: str
    commit: str
    date: str
    limits: Limits
    timings: tuple[Timing, ...]
    failures: Mapping[str, str]


def save(run: Run, path: Path) -> None:
    """As JSON, one timing a line."""
    fields = asdict(run)
    timings = ",\n  ".join(json.dumps(timing) for timing in fields.pop("timings"))
    head = json.dumps(fields, indent=1).removesuffix("\n}")
    path.write_text(f'{head},\n "timings": [\n  {timings}\n ]\n}}\n')


def load(path: Path) -> Run:
    """What `save` wrote. Raises ValueError, naming the file, when it is something else."""
    try:
        fields = json.loads(path.read_text())
        fields["limits"] = Limits(**fields["limits"])
        fields["timings"] = tuple(Timing(**timing) for timing in fields["timings"])
        return Run(**fields)
    except (TypeError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no result of the benchmarks: {error}") from error


def merge(runs: Sequence[Run]) -> Run:
    """Runs of one day's work as one: the limits of the first. Raises ValueError unless device, versions, commit and numerics id agree."""
    first = runs[0]
    for run in runs[1:]:
        for name in ("device", "numerics_id", "torch", "triton", "commit"):
            if getattr(run, name) != getattr(first, name):
                raise ValueError(f"results differ in their {name}: {getattr(first, name)} and {getattr(run, name)}")
    timings = tuple(timing for run in runs for timing in run.timings)
    failures = {case: why for run in runs for case, why in run.failures.items()}
    return replace(first, timings=timings, failures=failures)
