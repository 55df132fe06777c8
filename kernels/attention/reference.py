"""Causal attention over a paged cache on a CPU: a row's bits depend on its own query and on keys and values 0 .. its position alone.

Per split of 128 keys: scores, their largest, exponentials, their sum by a fixed tree, weighted values; the partial results are merged in
key order by the online-softmax rule. A masked key adds exact zeros, and so does a split that a row does not see (its factors are
exp(-inf) = 0 and exp(0) = 1), whatever finite numbers lie in the cache. Knows no sequences; see `plan.py` for who reads what.
"""

import math

import torch
from torch import Tensor

from espalier.kernels.attention.plan import KEY_SPLIT, QUERY_TILE, AttentionPlan, LongLane, ShortLanes
from espalier.kernels.elementary import tree_sum
from espalier.kernels.linear.blocked import batched_product


class Workspace:
    """Memory for the keys and values of a round, kept from layer to layer: new pages for every copy would cost more than the copy.

    One round at a time may use it; what was read last is overwritten by the next read.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def read(self, name: str, cached: Tensor, head_blocks: Tensor) -> Tensor:
        """Gathers from a cache [blocks, kv_heads, block_size, head_dim] -> fp32 [splits * kv_heads, 128, head_dim]."""
        rows = cached.view(-1, cached.shape[2] * cached.shape[3])
        shape = (head_blocks.shape[0], rows.shape[1])
        gathered = self._take(name, cached.dtype, shape)
        torch.index_select(rows, 0, head_blocks, out=gathered)
        if cached.dtype != torch.float32:
            gathered = self._take(name, torch.float32, shape).copy_(gathered)
        return gathered.view(-1, KEY_SPLIT, cached.shape[3])

    def _take(self, name: str, dtype: torch.dtype, shape: tuple[int, int]) -> Tensor:
        size = shape[0] * shape[1]
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(shape)


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, workspace: Workspace) -> Tensor:
    """q fp32 [rows, heads, head_dim]; keys, values [blocks, kv_heads, block_size, head_dim] fp32, fp16 or bf16 -> fp32 as q.

    Query head h reads key-value head h // (heads / kv_heads). Rows of q that no lane owns come out as zeros.
    """
    rows, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    # [kv_heads, rows, group, head_dim]; the scale goes into the query.
    grouped = (q * (1.0 / math.sqrt(head_dim))).view(rows, kv_heads, heads // kv_heads, head_dim).transpose(0, 1)
    out = torch.zeros_like(q)
    if plan.short is not None:
        _attend_short(grouped, keys, values, plan.short, workspace, out)
    for lane in plan.long:
        _attend_long(grouped, keys, values, lane, workspace, out)
    return out


def _attend_short(q: Tensor, keys: Tensor, values: Tensor, plan: ShortLanes, workspace: Workspace, out: Tensor) -> None:
    kv_heads, _, group, head_dim = q.shape
    num_lanes, num_items = plan.query_rows.shape[0], plan.item_lane.shape[0]
    tile_rows = QUERY_TILE * group
    # Head-major tiles: [lanes, kv_heads, 8 * group, head_dim], one copy an item.
    tiles = q[:, plan.query_rows].transpose(0, 1).reshape(num_lanes, kv_heads, tile_rows, head_dim)
    item_q = tiles[plan.item_lane].view(num_items * kv_heads, tile_rows, head_dim)
    item_k, item_v = _read(keys, values, plan, workspace)

    scores = batched_product(item_q, item_k.transpose(1, 2))
    masked = scores.view(num_items, kv_heads, QUERY_TILE, group, KEY_SPLIT).masked_fill_(plan.hidden, -math.inf)
    largest, total, weights = _softmax_parts(masked.view(scores.shape))
    weighted = batched_product(weights, item_v)

    # Items to [lanes, splits, ...]; a split that a lane does not have stays empty: largest -inf, sums 0.
    places = num_lanes * plan.num_splits
    width = kv_heads * tile_rows

    def placed(x: Tensor, empty: float) -> Tensor:
        x = x.reshape(num_items, width, -1)
        full = (
            x if num_items == places else x.new_full((places, *x.shape[1:]), empty).index_copy_(0, plan.item_place, x)
        )
        return full.view(num_lanes, plan.num_splits, width, -1)

    merged = _merge(placed(largest, -math.inf), placed(total, 0.0), placed(weighted, 0.0))
    by_row = merged.view(num_lanes, kv_heads, QUERY_TILE, group, head_dim).transpose(1, 2)
    by_row = by_row.reshape(num_lanes * QUERY_TILE, kv_heads * group, head_dim)
    out.index_copy_(0, plan.out_rows, by_row[plan.out_places])


def _merge(largest: Tensor, total: Tensor, weighted: Tensor) -> Tensor:
    """[lanes, splits, width, 1 | 1 | head_dim] -> [lanes, width, head_dim]: the splits of each lane merged in key order."""
    running = torch.cummax(largest, dim=1).values
    keep_old = torch.exp(running[:, :-1] - running[:, 1:])
    keep_new = torch.exp(largest[:, 1:] - running[:, 1:])
    sums, mixed = total[:, 0], weighted[:, 0]
    new_sums, new_mixed = total[:, 1:] * keep_new, weighted[:, 1:] * keep_new
    for split in range(largest.shape[1] - 1):
        sums = sums * keep_old[:, split] + new_sums[:, split]
        mixed = mixed * keep_old[:, split] + new_mixed[:, split]
    return mixed / sums


def _attend_long(q: Tensor, keys: Tensor, values: Tensor, plan: LongLane, workspace: Workspace, out: Tensor) -> None:
    kv_heads, _, group, head_dim = q.shape
    lane = plan.span
    num_tiles = -(-lane.num_rows // QUERY_TILE)
    tile_rows = QUERY_TILE * group
    padded = q.new_zeros((kv_heads, num_tiles * QUERY_TILE, group, head_dim))
    padded[:, : lane.num_rows] = q[:, lane.first_row : lane.first_row + lane.num_rows]
    tiles = padded.view(kv_heads, num_tiles, tile_rows, head_dim)
    lane_k, lane_v = _read(keys, values, plan, workspace)
    by_split = (lane.num_splits, kv_heads, KEY_SPLIT, head_dim)
    lane_k, lane_v = lane_k.view(by_split), lane_v.view(by_split)

    running = q.new_full((kv_heads, num_tiles, tile_rows, 1), -math.inf)
    sums = q.new_zeros((kv_heads, num_tiles, tile_rows, 1))
    mixed = q.new_zeros((kv_heads, num_tiles, tile_rows, head_dim))
    for split in range(lane.num_splits):
        first_key = split * KEY_SPLIT
        # Tiles before this one end before the split begins: it would change nothing in them.
        tile = max(0, (first_key - lane.start) // QUERY_TILE)
        scores = _shared_products(tiles[:, tile:], lane_k[split].transpose(1, 2))
        first_position = lane.start + tile * QUERY_TILE
        if first_key + KEY_SPLIT - 1 > first_position:
            positions = first_position + torch.arange((num_tiles - tile) * QUERY_TILE).view(-1, QUERY_TILE, 1, 1)
            hidden = first_key + torch.arange(KEY_SPLIT) > positions
            scores.view(kv_heads, -1, QUERY_TILE, group, KEY_SPLIT).masked_fill_(hidden, -math.inf)
        largest, total, weights = _softmax_parts(scores)
        weighted = _shared_products(weights, lane_v[split])
        old = running[:, tile:]
        new = torch.maximum(old, largest)
        keep_old, keep_new = torch.exp(old - new), torch.exp(largest - new)
        sums[:, tile:].mul_(keep_old).add_(total.mul_(keep_new))
        mixed[:, tile:].mul_(keep_old).add_(weighted.mul_(keep_new))
        running[:, tile:] = new
    merged = mixed.div_(sums).view(kv_heads, num_tiles * QUERY_TILE, group, head_dim)[:, : lane.num_rows]
    rows = slice(lane.first_row, lane.first_row + lane.num_rows)
    out[rows] = merged.transpose(0, 1).reshape(lane.num_rows, kv_heads * group, head_dim)


def _read(keys: Tensor, values: Tensor, plan: ShortLanes | LongLane, workspace: Workspace) -> tuple[Tensor, Tensor]:
    """Keys and values of the plan's splits, fp32 [splits * kv_heads, 128, head_dim] each."""
    k, v = workspace.read("keys", keys, plan.head_blocks), workspace.read("values", values, plan.head_blocks)
    # A masked key's weight is 0, but 0 times what a failed sequence may have left there, NaN or inf, is NaN.
    v.view(-1, v.shape[-1]).index_fill_(0, plan.unwritten, 0.0)
    return k, v


def _softmax_parts(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """scores [..., 128] -> the largest [..., 1], the sum of exponentials [..., 1], the exponentials (in the place of the scores)."""
    largest = scores.amax(dim=-1, keepdim=True)
    # A row that sees no key of the split has -inf everywhere; 0 in place of its largest keeps the difference a number.
    weights = scores.sub_(largest.masked_fill(largest == -math.inf, 0.0)).exp_()
    return largest, tree_sum(weights).unsqueeze(-1), weights


def _shared_products(a: Tensor, b: Tensor) -> Tensor:
    """a [heads, tiles, p, q] times b [heads, q, r], shared by the tiles -> [heads, tiles, p, r]."""
    heads, num_tiles, p, _ = a.shape
    if num_tiles == 1:
        return batched_product(a[:, 0], b).unsqueeze(1)
    out = a.new_empty((heads, num_tiles, p, b.shape[-1]))
    for head in range(heads):
        torch.bmm(a[head], b[head].expand(num_tiles, -1, -1), out=out[head])
    return out
