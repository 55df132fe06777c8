"""A paged cache with sequences in it, for tests of attention kernels on any device: blocks shuffled, unwritten cells NaN. Knows no kernel."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from espalier.kernels.attention import definition
from espalier.kernels.attention.lanes import FEW_ROWS, LaneTable, lane_table
from espalier.kernels.attention.plan import LaneSpan


@dataclass(frozen=True)
class Piece:
    """Rows of a sequence that ride in one call: those at positions start .. start + rows - 1."""

    sequence: int
    start: int
    rows: int


class PagedCase:
    """One layer's cache and the queries of every position of its sequences."""

    def __init__(
        self,
        lengths: Sequence[int],
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float16,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        draw = torch.Generator(device).manual_seed(seed)
        self.lengths, self.block_size, self.device = list(lengths), block_size, device
        counts = [-(-length // block_size) for length in lengths]
        spare = 3
        order = torch.randperm(sum(counts) + spare, generator=draw, device=device, dtype=torch.int64)
        self.blocks = list(order.split([*counts, spare]))[:-1]
        shape = (sum(counts) + spare, kv_heads, block_size, head_dim)
        self.keys, self.values = (torch.full(shape, math.nan, dtype=dtype, device=device) for _ in range(2))
        self.q: list[Tensor] = []
        for length, blocks in zip(lengths, self.blocks, strict=True):
            place = torch.arange(length, device=device)
            for cache in (self.keys, self.values):
                rows = torch.randn(length, kv_heads, head_dim, generator=draw, device=device)
                cache[blocks[place // block_size], :, place % block_size] = rows.to(dtype)
            # Scores of a few units: some keys matter, many matter a little.
            self.q.append((2 * torch.randn(length, heads, head_dim, generator=draw, device=device)).to(dtype))
        self.scale = head_dim**-0.5

    def cut(self, sequence: int, borders: Sequence[int]) -> list[Piece]:
        """The sequence's rows from borders[0] on, cut there."""
        return [Piece(sequence, a, b - a) for a, b in pairwise(borders)]

    def table(
        self,
        pieces: Sequence[Piece],
        *,
        lanes: int | None = None,
        max_context: int | None = None,
        num_tiles: int | None = None,
        few_rows: int = FEW_ROWS,
    ) -> LaneTable:
        """Rows of the pieces, one after the other. Lanes behind the last piece have no rows; entries behind a table's end lead nowhere."""
        spans: list[LaneSpan] = []
        for piece in pieces:
            end = piece.start + piece.rows
            blocks = self.blocks[piece.sequence][: -(-end // self.block_size)].cpu()
            spans.append(
                LaneSpan(spans[-1].first_row + spans[-1].num_rows if spans else 0, piece.rows, piece.start, blocks)
            )
        table = lane_table(
            spans,
            block_size=self.block_size,
            group=self.q[0].shape[1] // self.keys.shape[1],
            few_rows=few_rows,
            max_context=max_context,
            num_lanes=lanes,
            num_tiles=num_tiles,
        )
        for lane, span in enumerate(spans):
            table.block_tables[lane, span.blocks.shape[0] :] = -(1 << 20)
        return table.to(self.device)

    def queries(self, pieces: Sequence[Piece]) -> Tensor:
        """Their rows of q, in the order of `table`."""
        return torch.cat([self.q[piece.sequence][piece.start : piece.start + piece.rows] for piece in pieces])

    def exact(self, piece: Piece, window: int | None = None) -> Tensor:
        """What these rows should give, in float64."""
        end = piece.start + piece.rows
        k, v = (definition.gather(cache, self.blocks[piece.sequence], end) for cache in (self.keys, self.values))
        q = self.q[piece.sequence][piece.start : end]
        return definition.attention(q, k, v, piece.start, self.scale, window)


def relative_error(out: Tensor, exact: Tensor) -> float:
    """|out - exact| / |exact|, in the root of squares; NaN if anything is."""
    return float((out.double() - exact).norm() / exact.norm())
