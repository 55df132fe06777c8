"""LaneTable: which rows of a round stand at which positions of which cache blocks, as tensors that kernels read. Knows no kernel.

The numbers live on the device and may change between replays of a captured graph; the bounds are the host's and shape the grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from espalier.kernels.attention.plan import LaneSpan
from espalier.kernels.attention.splits import EVERY_KEY
from espalier.kernels.attention.work import TILE_ROWS, decode_shares, prompt_tiles

FEW_ROWS = 16  # a decode row and its drafts


@dataclass(frozen=True, slots=True)
class LaneTable:
    """Lane i owns rows first_row[i] .. first_row[i] + num_rows[i] - 1 of a round; they stand at positions start[i], start[i] + 1, ...

    first_row, num_rows, start: int32 [lanes]. A lane of no rows is skipped, whatever else is said of it.
    block_tables: int32 [lanes, max_blocks]; entry j is the cache block of positions j * block_size ...; entries behind a lane's last
    position may hold anything.
    tiles: int32 [any, 2], `prompt_tiles` of these lanes; an entry of lane -1 is skipped. shares: int32 [lanes, 3], `decode_shares` of these
    lanes; where max_rows is no more than few_rows nobody reads it, and it may have no entry.
    min_rows, max_rows: bounds of num_rows of the lanes that have any. max_context: bound of start + num_rows.
    few_rows: lanes of up to so many rows take the decode form, 1 .. 16, others are prompts: a matter of time and of scratch.
    """

    first_row: Tensor
    num_rows: Tensor
    start: Tensor
    block_tables: Tensor
    tiles: Tensor
    shares: Tensor
    min_rows: int
    max_rows: int
    max_context: int
    few_rows: int

    @property
    def num_lanes(self) -> int:
        return int(self.first_row.shape[0])

    def to(self, device: torch.device | str) -> "LaneTable":
        """The same numbers on a device."""
        names = ("first_row", "num_rows", "start", "block_tables", "tiles", "shares")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def lane_table(
    spans: Sequence[LaneSpan],
    *,
    block_size: int,
    group: int,
    few_rows: int = FEW_ROWS,
    max_context: int | None = None,
    num_lanes: int | None = None,
    num_tiles: int | None = None,
) -> LaneTable:
    """The table of these lanes on the CPU, within the tightest bounds but for what is given.

    group: query heads that share a key-value head. max_context: bound of positions, and what the block tables have room for. num_lanes:
    lanes of the table; those behind the last span have no rows. num_tiles: entries of `tiles`.
    """
    assert spans
    context = max_context or max(span.end for span in spans)
    count = num_lanes or len(spans)
    numbers = torch.zeros(3, count, dtype=torch.int32)
    blocks = torch.zeros(count, -(-context // block_size), dtype=torch.int32)
    for lane, span in enumerate(spans):
        assert span.num_rows > 0 and span.end <= context
        numbers[:, lane] = torch.tensor((span.first_row, span.num_rows, span.start))
        blocks[lane, : span.blocks.shape[0]] = span.blocks
    rows = [span.num_rows for span in spans]
    first_row, num_rows, start = numbers
    listed = torch.from_numpy(prompt_tiles(num_rows.numpy(), start.numpy(), group, few_rows))
    tiles = torch.full((listed.shape[0] if num_tiles is None else num_tiles, 2), -1, dtype=torch.int32)
    tiles[: listed.shape[0]] = listed
    shares = torch.from_numpy(decode_shares(num_rows.numpy(), start.numpy(), few_rows))
    return LaneTable(first_row, num_rows, start, blocks, tiles, shares, min(rows), max(rows), context, few_rows)


def check_call(q: Tensor, keys: Tensor, values: Tensor, lanes: LaneTable, window: int | None, out: Tensor) -> None:
    """Raises ValueError naming the argument that does not fit; looks at shapes and types only."""
    if q.dim() != 3 or q.stride(-1) != 1 or q.stride(-2) != q.shape[-1]:
        raise ValueError(
            f"q: needs [rows, heads, head_dim] with contiguous rows, got {tuple(q.shape)}, strides {q.stride()}"
        )
    if q.stride(0) % 16 or out.stride(0) % 16:
        raise ValueError(f"q, out: rows must lie a multiple of 16 numbers apart, got {q.stride(0)} and {out.stride(0)}")
    if keys.dim() != 4 or keys.shape != values.shape or not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("keys, values: need contiguous [blocks, kv_heads, block_size, head_dim] of one shape")
    if keys.dtype not in (torch.float16, torch.bfloat16) or values.dtype != keys.dtype:
        raise ValueError(f"keys, values: must both be float16 or bfloat16, got {keys.dtype} and {values.dtype}")
    kv_heads, block_size, head_dim = keys.shape[1:]
    if head_dim != q.shape[2] or head_dim % 16 or not 16 <= head_dim <= 256:
        raise ValueError(f"head_dim: keys have {head_dim} and q {q.shape[2]}; must agree, a multiple of 16, up to 256")
    if block_size % 16 or block_size & (block_size - 1) or block_size > 128:
        raise ValueError(f"block_size: must be 16, 32, 64 or 128, got {block_size}")
    if keys.numel() // head_dim >= 1 << 31:
        raise ValueError(f"keys, values: a kernel counts {keys.numel() // head_dim} slots in 32 bits")
    if q.shape[1] % kv_heads or q.shape[1] > 16 * kv_heads:
        raise ValueError(f"heads: {q.shape[1]} query heads do not share {kv_heads} key-value heads by 1 to 16")
    if out.shape != q.shape or out.stride(-1) != 1 or out.stride(-2) != out.shape[-1]:
        raise ValueError(f"out: needs q's shape {tuple(q.shape)} and contiguous rows, got {tuple(out.shape)}")
    if window is not None and not 0 < window < EVERY_KEY:
        raise ValueError(f"window: must be positive, got {window}")
    for name in ("first_row", "num_rows", "start"):
        tensor = getattr(lanes, name)
        if tensor.dtype != torch.int32 or tensor.shape != (lanes.num_lanes,) or not tensor.is_contiguous():
            raise ValueError(f"lanes.{name}: needs contiguous int32 [{lanes.num_lanes}]")
    tables = lanes.block_tables
    if tables.dtype != torch.int32 or tables.dim() != 2 or tables.shape[0] != lanes.num_lanes or tables.stride(1) != 1:
        raise ValueError(f"lanes.block_tables: needs int32 [{lanes.num_lanes}, max_blocks] with contiguous rows")
    if not 0 < lanes.few_rows <= FEW_ROWS:
        raise ValueError(f"lanes.few_rows: must be 1 to {FEW_ROWS}, got {lanes.few_rows}")
    mixed = lanes.max_rows > lanes.few_rows
    longest = -(-lanes.max_rows * (q.shape[1] // kv_heads) // TILE_ROWS)
    for name, least, width in (("tiles", longest, 2), ("shares", lanes.num_lanes, 3)):
        tensor = getattr(lanes, name)
        if tensor.dtype != torch.int32 or tensor.shape[1:] != (width,) or not tensor.is_contiguous():
            raise ValueError(f"lanes.{name}: needs contiguous int32 [any, {width}]")
        if mixed and tensor.shape[0] < least:
            raise ValueError(f"lanes.{name}: {tensor.shape[0]} entries, needs {least} at least")
    if tables.shape[1] * block_size < lanes.max_context:
        raise ValueError(f"lanes.block_tables: {tables.shape[1]} blocks do not hold {lanes.max_context} positions")
