"""Values as Grafana writes them, for the units that the boards use."""

from collections.abc import Callable

PER_SECOND = {"reqps": "req/s", "ops": "ops/s", "cpm": "c/min"}


def written(value: float, unit: str, decimals: int | None = None) -> str:
    """The value with its unit."""
    if unit.startswith("suffix:"):
        return f"{_number(value, decimals)} {unit.removeprefix('suffix:')}"
    if unit in PER_SECOND:
        return f"{_scaled(value, 1000, ('', 'K', 'M'), decimals)} {PER_SECOND[unit]}"
    return UNITS[unit](value, decimals)


def _percent(value: float, decimals: int | None) -> str:
    return f"{_number(100 * value, decimals)}%"


def _seconds(value: float, decimals: int | None) -> str:
    for size, name in ((60.0, "min"), (1.0, "s"), (1e-3, "ms")):
        if abs(value) >= size:
            return f"{_number(value / size, decimals)} {name}"
    return f"{_number(value * 1e6, decimals)} µs" if value else "0 s"


def _bytes(value: float, decimals: int | None) -> str:
    return _scaled(value, 1024, (" B", " KiB", " MiB", " GiB"), decimals)


def _short(value: float, decimals: int | None) -> str:
    return _scaled(value, 1000, ("", " K", " Mil"), decimals)


def _scaled(value: float, base: int, names: tuple[str, ...], decimals: int | None) -> str:
    power = 0
    while abs(value) >= base and power < len(names) - 1:
        value /= base
        power += 1
    return _number(value, decimals) + names[power]


def _number(value: float, decimals: int | None) -> str:
    if decimals is not None:
        return f"{value:.{decimals}f}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


UNITS: dict[str, Callable[[float, int | None], str]] = {
    "percentunit": _percent,
    "s": _seconds,
    "bytes": _bytes,
    "short": _short,
    "none": _number,
}
