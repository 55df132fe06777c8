"""Which keys each query row of a round reads, as index tensors shared by all layers. Knows positions and blocks, not sequences.

Keys are taken in *splits* of 128 at absolute positions, query rows in *tiles* of 8. Lanes of one tile are computed together, every
(lane, split) pair an *item* with keys of its own; a lane of several tiles is computed by itself, its tiles sharing each split's keys.
Both ways make the same products for a row, so which one a row takes does not show in its bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KEY_SPLIT = 128
QUERY_TILE = 8


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """Rows of one lane: rows first_row .. first_row + num_rows - 1 of the round stand at positions start, start + 1, ...

    blocks: int64, the cache blocks that hold positions 0 .. start + num_rows - 1; no more than needed.
    """

    first_row: int
    num_rows: int
    start: int
    blocks: Tensor

    @property
    def end(self) -> int:
        """Positions the lane's last row may see."""
        return self.start + self.num_rows

    @property
    def num_splits(self) -> int:
        """Splits of keys that hold them."""
        return -(-self.end // KEY_SPLIT)


@dataclass(frozen=True, slots=True)
class ShortLanes:
    """Lanes of at most one tile. L lanes, N items (the splits of lane 0 in order, then those of lane 1, ...), H key-value heads.

    query_rows: int64 [L, 8], rows of the round (padding repeats a row). num_splits: most splits of a lane.
    item_lane: int64 [N]. item_place: int64 [N], lane * num_splits + split. head_blocks: int64 [N * H * 128 / block_size] into a cache
    viewed [blocks * H, block_size * head_dim]. unwritten: int64, keys of what that gathers, [N * H * 128], that lie behind their lane's
    end in its last block: whatever was there before. hidden: bool [N, 1, 8, 1, 128], keys after the row's position.
    out_rows, out_places: int64 [rows], the rows of the round these lanes fill, and where each stands in [L * 8].
    """

    query_rows: Tensor
    num_splits: int
    item_lane: Tensor
    item_place: Tensor
    head_blocks: Tensor
    unwritten: Tensor
    hidden: Tensor
    out_rows: Tensor
    out_places: Tensor


@dataclass(frozen=True, slots=True)
class LongLane:
    """One lane of more than one tile; head_blocks and unwritten as in ShortLanes, [S, H, 128] keys for S splits."""

    span: LaneSpan
    head_blocks: Tensor
    unwritten: Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """All lanes of one round."""

    short: ShortLanes | None
    long: tuple[LongLane, ...]


def plan_attention(lanes: Sequence[LaneSpan], *, num_kv_heads: int, block_size: int, zero_block: int) -> AttentionPlan:
    """The plan of a round. zero_block: a block of zeros, read in place of blocks that a lane's last split lacks."""
    short = [lane for lane in lanes if lane.num_rows <= QUERY_TILE]
    long = [lane for lane in lanes if lane.num_rows > QUERY_TILE]
    return AttentionPlan(
        _plan_short(short, num_kv_heads, block_size, zero_block) if short else None,
        tuple(LongLane(lane, *_gather([lane], num_kv_heads, block_size, zero_block)) for lane in long),
    )


def _plan_short(lanes: list[LaneSpan], num_kv_heads: int, block_size: int, zero_block: int) -> ShortLanes:
    splits = [lane.num_splits for lane in lanes]
    most = max(splits)
    tile = torch.arange(QUERY_TILE)
    first_rows = torch.tensor([lane.first_row for lane in lanes])
    num_rows = torch.tensor([lane.num_rows for lane in lanes])
    starts = torch.tensor([lane.start for lane in lanes])
    offsets = torch.minimum(tile, num_rows[:, None] - 1)  # [L, 8]
    item_lane = torch.repeat_interleave(torch.arange(len(lanes)), torch.tensor(splits))
    item_split = torch.cat([torch.arange(n) for n in splits])
    positions = starts[:, None] + offsets
    keys = item_split[:, None] * KEY_SPLIT + torch.arange(KEY_SPLIT)  # [N, 128]
    real = tile < num_rows[:, None]
    head_blocks, unwritten = _gather(lanes, num_kv_heads, block_size, zero_block)
    return ShortLanes(
        query_rows=first_rows[:, None] + offsets,
        num_splits=most,
        item_lane=item_lane,
        item_place=item_lane * most + item_split,
        head_blocks=head_blocks,
        unwritten=unwritten,
        hidden=(keys[:, None, :] > positions[item_lane][:, :, None])[:, None, :, None, :],
        out_rows=(first_rows[:, None] + tile)[real],
        out_places=torch.nonzero(real.flatten()).flatten(),
    )


def _gather(lanes: list[LaneSpan], num_kv_heads: int, block_size: int, zero_block: int) -> tuple[Tensor, Tensor]:
    """head_blocks and unwritten of these lanes' splits, one lane after the other."""
    heads = torch.arange(num_kv_heads)[:, None]
    blocks: list[Tensor] = []
    unwritten: list[Tensor] = []
    num_splits = 0
    for lane in lanes:
        assert lane.blocks.shape[0] == -(-lane.end // block_size)
        missing = lane.num_splits * KEY_SPLIT // block_size - lane.blocks.shape[0]
        blocks += [lane.blocks, torch.full((missing,), zero_block)]
        num_splits += lane.num_splits
        first_key = lane.end % KEY_SPLIT
        behind = torch.arange(first_key, first_key + -lane.end % block_size)
        unwritten.append((((num_splits - 1) * num_kv_heads + heads) * KEY_SPLIT + behind).flatten())
    by_split = torch.cat(blocks).view(num_splits, 1, KEY_SPLIT // block_size)
    return (by_split * num_kv_heads + heads).flatten(), torch.cat(unwritten)
