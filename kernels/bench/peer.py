"""The peer's times for a linear (`data/README.md`). Knows nothing of ours."""

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from espalier.kernels.bench.registry import Label

SOURCE = Path(__file__).with_name("data") / "exllamav3-h200.csv"

Key = tuple[str, str, int, int, int, int]  # codebook, int8, bits, in, out, rows


@dataclass(frozen=True, slots=True)
class PeerTimes:
    """us of one call. accurate: with fp16 activations. lossy: with int8 activations, where it has them (mul1, 1 and 2 rows)."""

    accurate: float
    lossy: float | None


def peer_times(labels: Mapping[str, Label]) -> PeerTimes | None:
    """For a linear's labels (in, out, rate, codebook, rows); None where the peer was not timed."""
    try:
        bits, rows = float(labels["rate"]), int(labels["rows"])
        shape = int(labels["in"]), int(labels["out"])
        codebook = str(labels["codebook"])
    except KeyError:
        return None
    if bits != int(bits):
        return None

    def us(int8: str) -> float | None:
        return _times().get((codebook, int8, int(bits), *shape, rows))

    # `default` takes the int8 path at 1 and 2 rows only.
    without = us("off") if us("off") is not None else us("-")
    default = us("default")
    if without is not None:
        return PeerTimes(without, default)
    return None if default is None else PeerTimes(default, None)


@functools.cache
def _times() -> Mapping[Key, float]:
    with SOURCE.open(newline="") as lines:
        return {
            (row["codebook"], row["int8"], int(row["bits"]), int(row["in"]), int(row["out"]), int(row["rows"])): float(
                row["us"]
            )
            for row in csv.DictReader(lines)
            if row["what"] == "exllamav3"
        }
