"""Rows of the device sampler: whole rounds of one kind of row over a large vocabulary, beside the same done with torch's sort and argmax."""

import functools
from dataclasses import replace

import torch
from torch import Tensor

from espalier.kernels.bench.registry import OURS, BenchCase, Call, Inputs, Workload, copies_past_l2
from espalier.kernels.sampling.history import empty_history
from espalier.kernels.sampling.rows import Limits, Needs, Row, pack_rows
from espalier.kernels.sampling.sample import Drawn, sample, scratch_size

VOCABULARY = 248_320
ROWS = (1, 8, 64)
TORCH = "torch"
KINDS = {
    "greedy": Row(temperature=0.0),
    "temperature": Row(),
    "min-p": Row(min_p=0.05),
    "k50-p0.95-min-p": Row(top_k=50, top_p=0.95, min_p=0.02),
    "p0.95": Row(top_p=0.95),
    "k50-penalties": Row(top_k=50, repetition=1.1, presence=0.1, frequency=0.1),
    "greedy-top20": Row(temperature=0.0, num_top=20),
}


def cases() -> list[BenchCase]:
    """By kind, then by rows."""
    return [
        BenchCase("sample", {"kind": kind, "vocab": VOCABULARY, "rows": rows}, functools.partial(_sample, kind, rows))
        for kind in KINDS
        for rows in ROWS
    ]


def _sample(kind: str, rows: int, inputs: Inputs) -> Workload:
    limits = Limits(VOCABULARY)
    lanes = [replace(KINDS[kind], seed=seed) for seed in range(rows)]
    num_bytes = rows * VOCABULARY * 4
    copies = copies_past_l2(num_bytes)
    logits = inputs.randn(copies, rows, VOCABULARY, dtype=torch.float32) * 3
    lane_ids = torch.arange(rows, dtype=torch.int32, device=inputs.device)
    positions = inputs.randint(0, 100_000, rows, dtype=torch.int64)
    table = pack_rows(lanes, limits).to(inputs.device)
    seen = empty_history(rows, VOCABULARY, inputs.device)
    out, scratch, needs = (
        Drawn.empty(rows, inputs.device),
        inputs.scratch(scratch_size(rows, limits)),
        Needs.of(lanes, limits),
    )

    def ours(i: int) -> None:
        sample(logits[i], lane_ids, positions, table, seen, limits, out, scratch, needs)

    calls = {OURS: Call(ours, copies)}
    if kind == "greedy":
        calls[TORCH] = Call(lambda i: logits[i].argmax(-1), copies)
    elif kind == "k50-p0.95-min-p":
        calls[TORCH] = Call(lambda i: _by_topk(logits[i]), copies)
    elif kind == "p0.95":
        calls[TORCH] = Call(lambda i: _by_sort(logits[i]), copies)
    return Workload(calls, num_bytes)


def _by_topk(logits: Tensor) -> Tensor:
    return _draw(*logits.topk(50, -1))


def _by_sort(logits: Tensor) -> Tensor:
    return _draw(*logits.sort(-1, descending=True))


def _draw(values: Tensor, ids: Tensor) -> Tensor:
    """top_p 0.95 and a draw by exponential noise, as samplers in plain torch do it."""
    probabilities = values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before > 0.95, 0.0)
    noise = torch.empty_like(probabilities).exponential_(1)
    return ids.gather(-1, (probabilities / noise).argmax(-1, keepdim=True))
