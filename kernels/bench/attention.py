"""Rows of paged attention: decode at several streams and contexts, draft rounds, prompts whole and in chunks. 32 query heads, 8 key-value heads."""

import functools

import torch
from torch import Tensor

from espalier.kernels.attention.lanes import LaneTable, lane_table
from espalier.kernels.attention.paged import paged_attention, scratch_size
from espalier.kernels.attention.plan import LaneSpan
from espalier.kernels.bench.registry import OURS, BenchCase, Call, Inputs, Workload, copies_past_l2
from espalier.kernels.counters import Scratch
from espalier.kernels.device import device_class

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16
SCALE = HEAD_DIM**-0.5
CACHE_TOKENS = 1 << 19
SDPA = "sdpa"  # torch's attention over dense keys and values of the same size
STREAMS = ((1, 512), (1, 8192), (1, 32768), (1, 131072), (8, 512), (8, 8192), (8, 32768), (64, 512), (64, 8192))
DRAFTS = ((1, 8192, 8), (8, 8192, 8))
PROMPTS = ((2048, 2048), (8192, 8192), (8192, 2048), (32768, 32768), (32768, 2048))


def cases() -> list[BenchCase]:
    """Decode first."""
    found = [_decode_case(streams, context, 1) for streams, context in STREAMS]
    found += [_decode_case(*draft) for draft in DRAFTS]
    return found + [
        BenchCase(
            "attention-prefill",
            {"prompt": prompt, "chunk": chunk},
            functools.partial(_prefill, prompt, chunk),
            shares="cache",
        )
        for prompt, chunk in PROMPTS
    ]


def _decode_case(streams: int, context: int, rows: int) -> BenchCase:
    labels = {"streams": streams, "context": context, "rows": rows}
    return BenchCase("attention-decode", labels, functools.partial(_decode, streams, context, rows), shares="cache")


def _cache(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values, and the order in which sequences take blocks."""
    shape = (CACHE_TOKENS // BLOCK, KV_HEADS, BLOCK, HEAD_DIM)
    order = torch.randperm(shape[0], device=inputs.device, generator=inputs.generator).int()
    return inputs.randn(*shape), inputs.randn(*shape), order


def _lanes(order: Tensor, streams: int, context: int, rows: int, first: int) -> LaneTable:
    """`streams` sequences of `context` positions, the last `rows` of each in the call; their blocks begin at `first` in `order`."""
    count = -(-context // BLOCK)
    place = (torch.arange(streams * count, device=order.device) + first) % order.shape[0]
    blocks = order[place].view(streams, count).cpu()
    spans = [LaneSpan(stream * rows, rows, context - rows, blocks[stream]) for stream in range(streams)]
    return lane_table(spans, block_size=BLOCK, group=HEADS // KV_HEADS).to(order.device)


def _scratch(inputs: Inputs, lanes: LaneTable) -> Scratch:
    size = scratch_size(
        device_class(inputs.device), lanes.num_lanes, lanes.max_rows, lanes.max_context, heads=HEADS, kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
    )  # fmt: skip
    return inputs.scratch(size)


def _decode(streams: int, context: int, rows: int, inputs: Inputs) -> Workload:
    keys, values, order = inputs.once("cache", lambda: _cache(inputs))
    num_bytes = streams * context * KV_HEADS * HEAD_DIM * 4
    copies = copies_past_l2(num_bytes)
    blocks = streams * -(-context // BLOCK)
    lanes = [_lanes(order, streams, context, rows, copy * blocks) for copy in range(copies)]
    q = inputs.randn(streams * rows, HEADS, HEAD_DIM)
    out = inputs.empty(*q.shape)
    scratch = _scratch(inputs, lanes[0])
    calls = {
        OURS: Call(lambda i: paged_attention(q, keys, values, lanes[i], scratch, scale=SCALE, out=out), copies),
    }
    if rows == 1:
        dense = [inputs.randn(streams, KV_HEADS, context, HEAD_DIM) for _ in range(2 * copies)]
        query = q.view(streams, 1, HEADS, HEAD_DIM).transpose(1, 2)
        attend = torch.nn.functional.scaled_dot_product_attention
        calls[SDPA] = Call(lambda i: attend(query, dense[2 * i], dense[2 * i + 1], enable_gqa=True), copies)
    return Workload(calls, num_bytes=num_bytes, flops=4 * streams * rows * context * HEADS * HEAD_DIM)


def _prefill(prompt: int, chunk: int, inputs: Inputs) -> Workload:
    keys, values, order = inputs.once("cache", lambda: _cache(inputs))
    q = inputs.randn(prompt, HEADS, HEAD_DIM)
    out = inputs.empty(*q.shape)
    starts = range(0, prompt, chunk)
    lanes = [_lanes(order, 1, start + chunk, chunk, 0) for start in starts]
    scratch = _scratch(inputs, lanes[-1])

    def ours(_: int) -> None:
        for start, table in zip(starts, lanes, strict=True):
            rows = slice(start, start + chunk)
            paged_attention(q[rows], keys, values, table, scratch, scale=SCALE, out=out[rows])

    calls = {OURS: Call(ours)}
    if chunk == prompt:
        query = q.view(1, prompt, HEADS, HEAD_DIM).transpose(1, 2)
        k, v = (inputs.randn(1, KV_HEADS, prompt, HEAD_DIM) for _ in range(2))
        attend = torch.nn.functional.scaled_dot_product_attention
        calls[SDPA] = Call(lambda _: attend(query, k, v, is_causal=True, enable_gqa=True))
    num_bytes = (2 * q.numel() + 2 * prompt * KV_HEADS * HEAD_DIM) * 2
    # Causal: a row at position p sees p + 1 keys.
    flops = 2 * prompt * (prompt + 1) * HEADS * HEAD_DIM
    return Workload(calls, num_bytes=num_bytes, flops=flops, power_bound=True)
