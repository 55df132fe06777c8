"""Which rows go to which expert: a stable counting sort of (token, slot) pairs on the device, and the blocks of rows that products run over.

One launch, one program an expert, no atomics, nothing read back: the grids of what follows are bounds from shapes, and blocks beyond the last
used one say so. Pairs of one expert keep the order of tokens. Knows no weights.
"""
# Constexprs are written in capitals; device functions have no types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024  # pairs looked at together


@dataclass(frozen=True, slots=True)
class Route:
    """Sorted rows and their blocks, int32, overwritten by every `route` call.

    pair_of [pairs]: the pair, token * top_k + slot, of each sorted row; -1 for the rows of pairs without an expert, which come last.
    row_of [pairs]: the sorted row of each pair; -1 for a pair without an expert.
    blocks [max_blocks, 3]: expert, first row and end row of each block of at most `block_rows` rows; expert -1 when it is unused.
    """

    pair_of: Tensor
    row_of: Tensor
    blocks: Tensor
    block_rows: int
    num_experts: int

    @property
    def num_pairs(self) -> int:
        return int(self.pair_of.shape[0])

    @property
    def num_blocks(self) -> int:
        return int(self.blocks.shape[0])


def block_rows(num_pairs: int, num_experts: int, least: int, most: int) -> int:
    """Rows of a block, `least` or twice, four times, ... that, up to `most`: about as many as an expert gets."""
    rows = least
    while rows < most and num_pairs > rows * num_experts:
        rows *= 2
    return rows


def max_blocks(num_pairs: int, num_experts: int, rows: int) -> int:
    """The most blocks that any choice of experts makes: each expert that is chosen may leave one block partly empty."""
    chosen = min(num_pairs, num_experts)
    return chosen + (num_pairs - chosen) // rows


def allocate_route(num_pairs: int, num_experts: int, rows: int, device: torch.device) -> Route:
    """For `num_pairs` pairs and blocks of `rows` rows."""
    sizes = (num_pairs, num_pairs, 3 * max_blocks(num_pairs, num_experts, rows))
    pair_of, row_of, blocks = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    return Route(pair_of, row_of, blocks.view(-1, 3), rows, num_experts)


@triton.jit(do_not_specialize=["pairs", "num_blocks"])
def _route_kernel(
    ids, pair_of, row_of, blocks, pairs, num_blocks, EXPERTS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        chosen = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32)
        counts += tl.histogram(tl.where((chosen >= 0) & (chosen < EXPERTS), chosen, EXPERTS), BINS)
    counts = tl.where(bins < EXPERTS, counts, 0)
    count = tl.sum(tl.where(bins == expert, counts, 0))
    first = tl.sum(tl.where(bins < expert, counts, 0))
    first_block = tl.sum(tl.where(bins < expert, (counts + ROWS - 1) // ROWS, 0))

    row = first
    for start in range(0, pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        chosen = tl.load(ids + pair, mask=pair < pairs, other=-1).to(tl.int32)
        mine = (chosen == expert).to(tl.int32)
        place = row + tl.cumsum(mine, 0) - 1
        tl.store(pair_of + place, pair, mask=mine == 1)
        tl.store(row_of + pair, place, mask=mine == 1)
        row += tl.sum(mine)

    index = tl.arange(0, CHUNK)
    for start in range(0, tl.cdiv(count, ROWS), CHUNK):
        block = start + index
        used = block * ROWS < count
        p = blocks + (first_block + block) * 3
        tl.store(p, tl.full([CHUNK], 0, tl.int32) + expert, mask=used)
        tl.store(p + 1, first + block * ROWS, mask=used)
        tl.store(p + 2, first + tl.minimum(block * ROWS + ROWS, count), mask=used)

    if expert == 0:
        # What nobody uses: blocks, sorted rows, and the places of pairs without an expert.
        for start in range(tl.sum((counts + ROWS - 1) // ROWS), num_blocks, CHUNK):
            tl.store(blocks + (start + index) * 3, tl.full([CHUNK], -1, tl.int32), mask=start + index < num_blocks)
        for start in range(tl.sum(counts), pairs, CHUNK):
            tl.store(pair_of + start + index, tl.full([CHUNK], -1, tl.int32), mask=start + index < pairs)
        for start in range(0, pairs, CHUNK):
            pair = start + index
            chosen = tl.load(ids + pair, mask=pair < pairs, other=0).to(tl.int32)
            none = (chosen < 0) | (chosen >= EXPERTS)
            tl.store(row_of + pair, tl.full([CHUNK], -1, tl.int32), mask=none & (pair < pairs))


def route(ids: Tensor, out: Route) -> None:
    """ids: int32 or int64 [tokens, top_k] contiguous; a pair whose id is not an expert's (another shard's, say -1) takes part in nothing.

    Raises ValueError when `out` is for another number of pairs.
    """
    if ids.dtype not in (torch.int32, torch.int64) or not ids.is_contiguous():
        raise ValueError(f"ids must be contiguous int32 or int64, is {ids.dtype} {list(ids.shape)}")
    if ids.numel() != out.num_pairs:
        raise ValueError(f"ids has {ids.numel()} pairs, the route {out.num_pairs}")
    bins = triton.next_power_of_2(out.num_experts + 1)  # one more, for pairs without an expert
    _route_kernel[(out.num_experts,)](
        ids, out.pair_of, out.row_of, out.blocks, out.num_pairs, out.num_blocks,
        EXPERTS=out.num_experts, BINS=bins, ROWS=out.block_rows, CHUNK=_CHUNK, num_warps=4,
    )  # fmt: skip
