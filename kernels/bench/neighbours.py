"""Rows of what stands between the products: rotations, norms, gates, rope, embeddings; fused forms beside the launches that they replace."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from espalier.kernels.activation.silu_mul import silu_mul
from espalier.kernels.activation.silu_mul_rotate import silu_mul_rotate
from espalier.kernels.attention.store import store_kv
from espalier.kernels.bench.registry import OURS, BenchCase, Call, Inputs, Workload, copies_past_l2
from espalier.kernels.embedding.gather import gather
from espalier.kernels.hadamard.rotate import rotate_input
from espalier.kernels.norm.add_norm_rotate import add_norm_rotate
from espalier.kernels.norm.rms_norm import rms_norm
from espalier.kernels.rope.norm_rotate_store import norm_rotate_store
from espalier.kernels.rope.rotate_heads import rotate_heads

ROWS = (1, 8, 64, 2048, 8192)
HIDDEN, INNER = 5120, 17408
HEADS, KV_HEADS, HEAD_DIM, BLOCK = 24, 4, 128, 64
VOCABULARY = 151_936
UNFUSED = "unfused"
EPS = 1e-6


def cases() -> list[BenchCase]:
    """By op, then by rows."""
    found = [
        _case("rotate", {"in": width}, functools.partial(_rotate, width), rows)
        for width in (HIDDEN, INNER)
        for rows in ROWS
    ]
    found += [_case("add-norm-rotate", {"n": HIDDEN, "members": 2}, _add_norm_rotate, rows) for rows in ROWS]
    found += [_case("silu-mul-rotate", {"n": INNER}, _silu_mul_rotate, rows) for rows in ROWS]
    found += [_case("norm-rope-store", {"heads": HEADS, "kv_heads": KV_HEADS}, _norm_rope_store, rows) for rows in ROWS]
    found += [_case("rms-norm", {"n": HIDDEN}, _rms_norm, rows) for rows in ROWS]
    found += [_case("embedding", {"n": HIDDEN}, _embedding, rows) for rows in ROWS]
    return found


def _case(op: str, labels: dict[str, int], make: Callable[[int, Inputs], Workload], rows: int) -> BenchCase:
    return BenchCase(op, {**labels, "rows": rows}, functools.partial(make, rows))


def _rotate(width: int, rows: int, inputs: Inputs) -> Workload:
    num_bytes = rows * width * 4
    copies = copies_past_l2(num_bytes)
    x, suh, out = inputs.randn(copies, rows, width), inputs.randn(1, width), inputs.empty(copies, 1, rows, width)
    return Workload({OURS: Call(lambda i: rotate_input(x[i], suh, out[i]), copies)}, num_bytes)


def _add_norm_rotate(rows: int, inputs: Inputs) -> Workload:
    num_bytes = rows * HIDDEN * (4 + 2 + 4 + 2 * 2)
    copies = copies_past_l2(num_bytes)
    residual, y = inputs.randn(copies, rows, HIDDEN, dtype=torch.float32), inputs.randn(copies, rows, HIDDEN)
    weight, suh = inputs.randn(HIDDEN), inputs.randn(2, HIDDEN)
    total, normed = (inputs.empty(copies, rows, HIDDEN, dtype=torch.float32) for _ in range(2))
    rotated = inputs.empty(copies, 2, rows, HIDDEN)

    def fused(i: int) -> None:
        add_norm_rotate(residual[i], y[i], weight, EPS, suh, total=total[i], rotated=rotated[i])

    def unfused(i: int) -> None:
        add_norm_rotate(residual[i], y[i], weight, EPS, None, total=total[i], normed=normed[i])
        rotate_input(normed[i], suh, rotated[i])

    return Workload({OURS: Call(fused, copies), UNFUSED: Call(unfused, copies)}, num_bytes)


def _silu_mul_rotate(rows: int, inputs: Inputs) -> Workload:
    num_bytes = rows * INNER * (2 * 2 + 2)
    copies = copies_past_l2(num_bytes)
    gate_up, suh = inputs.randn(copies, rows, 2 * INNER), inputs.randn(1, INNER)
    gated, out = inputs.empty(copies, rows, INNER, dtype=torch.float32), inputs.empty(copies, 1, rows, INNER)

    def unfused(i: int) -> None:
        silu_mul(gate_up[i], gated[i])
        rotate_input(gated[i], suh, out[i])

    fused = Call(lambda i: silu_mul_rotate(gate_up[i], suh, out[i]), copies)
    return Workload({OURS: fused, UNFUSED: Call(unfused, copies)}, num_bytes)


def _norm_rope_store(rows: int, inputs: Inputs) -> Workload:
    """fp16 q, k, v side by side, norms of heads, full rope, fp16 cache."""
    num_bytes = rows * (HEADS + 2 * KV_HEADS) * HEAD_DIM * 4
    copies = copies_past_l2(num_bytes)
    qkv = inputs.randn(copies, rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
    q, k, v = qkv[:, :, :HEADS], qkv[:, :, HEADS:-KV_HEADS], qkv[:, :, -KV_HEADS:]
    weights = inputs.randn(HEAD_DIM), inputs.randn(HEAD_DIM)
    cos, sin = (inputs.randn(rows, HEAD_DIM // 2, dtype=torch.float32) for _ in range(2))
    positions, slots = (
        torch.arange(rows, device=inputs.device, dtype=torch.int32),
        torch.arange(rows, device=inputs.device),
    )
    keys, values = (inputs.empty(copies, -(-rows // BLOCK), KV_HEADS, BLOCK, HEAD_DIM) for _ in range(2))
    out = inputs.empty(copies, rows, HEADS, HEAD_DIM)
    normed_q = inputs.empty(rows, HEADS, HEAD_DIM, dtype=torch.float32)
    normed_k, turned_k = (inputs.empty(rows, KV_HEADS, HEAD_DIM, dtype=torch.float32) for _ in range(2))

    def fused(i: int) -> None:
        norm_rotate_store(q[i], k[i], v[i], weights, EPS, cos, sin, positions, slots, out[i], keys[i], values[i])

    def unfused(i: int) -> None:
        rms_norm(q[i], weights[0], EPS, normed_q)
        rms_norm(k[i], weights[1], EPS, normed_k)
        rotate_heads(normed_q, cos, sin, positions, out[i])
        rotate_heads(normed_k, cos, sin, positions, turned_k)
        store_kv(turned_k, v[i], keys[i], values[i], slots)

    return Workload({OURS: Call(fused, copies), UNFUSED: Call(unfused, copies)}, num_bytes)


def _rms_norm(rows: int, inputs: Inputs) -> Workload:
    num_bytes = rows * HIDDEN * 8
    copies = copies_past_l2(num_bytes)
    x, weight = inputs.randn(copies, rows, HIDDEN, dtype=torch.float32), inputs.randn(HIDDEN)
    out = inputs.empty(copies, rows, HIDDEN, dtype=torch.float32)
    return Workload({OURS: Call(lambda i: rms_norm(x[i], weight, EPS, out[i]), copies)}, num_bytes)


def _embedding(rows: int, inputs: Inputs) -> Workload:
    num_bytes = rows * HIDDEN * 6
    copies = copies_past_l2(num_bytes)
    table: Tensor = inputs.once("table", lambda: inputs.randn(VOCABULARY, HIDDEN, dtype=torch.bfloat16))
    token_ids = inputs.randint(0, VOCABULARY, copies, rows, dtype=torch.int32)
    out = inputs.empty(copies, rows, HIDDEN, dtype=torch.float32)
    return Workload({OURS: Call(lambda i: gather(token_ids[i], table, out[i]), copies)}, num_bytes)
