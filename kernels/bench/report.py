"""Results as text: one table an op, with rates, shares and ratios; `summary.py` has the means. Knows no clock."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from espalier.kernels.bench.registry import CUBLAS, OURS, written
from espalier.kernels.bench.results import STEADY, Run, Timing
from espalier.kernels.bench.summary import linear_summary, peer_ratio, table

Calls = Mapping[str, Timing]  # the calls of one case in one mode, by name


def markdown(run: Run) -> str:
    """The whole page."""
    parts = [_head(run)]
    parts += linear_summary(run.timings)
    ops = dict.fromkeys(timing.op for timing in run.timings)
    parts += [_table(op, [timing for timing in run.timings if timing.op == op], run) for op in ops]
    if run.failures:
        parts.append("## Not timed\n\n" + "\n".join(f"- `{name}`: {why}" for name, why in run.failures.items()))
    return "\n\n".join(parts) + "\n"


def _head(run: Run) -> str:
    return (
        f"# Kernels on one {run.device}, {run.date}\n\n"
        f"PyTorch {run.torch}, Triton {run.triton}, commit {run.commit}, numerics id `{run.numerics_id}`. Measured limits: "
        f"{run.limits.copy_gb_s:.0f} GB/s (device copy, read plus written), {run.limits.product_tflop_s:.0f} TFLOP/s (cuBLAS, fp16, "
        "8192^3, cool).\n\n"
        "us: median of a call in replayed CUDA graphs that go round their inputs past the L2; `+-`: half the distance of the quartiles. "
        "GB/s: of what the call must move, for linears the packed weights. Shares are of the measured limits. cool: a pause before each "
        "replay; hot: none, each call at its own power limit. Ratios are the other's time over ours."
    )


def _table(op: str, timings: Sequence[Timing], run: Run) -> str:
    cases = list(_cases(timings))
    keys = list(dict.fromkeys(key for calls in cases for key in calls[OURS].labels))
    others = [name for name in dict.fromkeys(timing.call for timing in timings) if name not in (OURS, CUBLAS)]
    cublas, peer = any(CUBLAS in calls for calls in cases), any(peer_ratio(calls[OURS]) for calls in cases)
    modes = any(calls[OURS].mode != STEADY for calls in cases)
    head = [*keys, *(["mode"] if modes else []), "us", "+-", "GB/s", "of copy"]
    flops = any(calls[OURS].flops for calls in cases)
    head += ["TFLOP/s", "of product"] if flops else []
    head += [f"{name} us" for name in others]
    head += ["cuBLAS us", "ratio"] if cublas else []
    head += ["peer us", "ratio", "lossy ratio"] if peer else []
    lines = []
    for calls in cases:
        ours = calls[OURS]
        gb_s, tflop_s = ours.num_bytes / ours.us * 1e-3, ours.flops / ours.us * 1e-6
        cells = [written(ours.labels.get(key, "")) for key in keys] + ([ours.mode] if modes else [])
        cells += [f"{ours.us:.1f}", f"{ours.spread:.1%}", f"{gb_s:.0f}", f"{gb_s / run.limits.copy_gb_s:.0%}"]
        cells += [f"{tflop_s:.1f}", f"{tflop_s / run.limits.product_tflop_s:.0%}"] if flops else []
        cells += [f"{calls[name].us:.1f}" if name in calls else "" for name in others]
        if cublas:
            library = calls.get(CUBLAS)
            cells += [f"{library.us:.1f}", f"{library.us / ours.us:.2f}"] if library else ["", ""]
        if peer:
            accurate, lossy = peer_ratio(ours, lossy=False), peer_ratio(ours, lossy=True)
            cells += [f"{accurate * ours.us:.1f}", f"{accurate:.2f}"] if accurate else ["", ""]
            cells += [f"{lossy:.2f}" if lossy else ""]
        lines.append(cells)
    return f"## {op}\n\n{table(head, lines)}"


def _cases(timings: Iterable[Timing]) -> Iterator[Calls]:
    """Calls of each case and mode together; those without a call of ours are left out."""
    found: dict[tuple[object, ...], dict[str, Timing]] = {}
    for timing in timings:
        found.setdefault((*timing.labels.items(), timing.mode), {})[timing.call] = timing
    return (calls for calls in found.values() if OURS in calls)
