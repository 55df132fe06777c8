"""Batch: a round's rows as tensors, made from lanes whose tokens are known. Knows positions and slots; no parameters, no sampling."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels.attention.plan import AttentionPlan, LaneSpan, plan_attention
from espalier.kernels.linear.blocked import ROW_BLOCK, padded_rows


@dataclass(frozen=True, slots=True)
class LaneRows:
    """Rows of one lane with their tokens resolved. block_ids: the sequence's table, at least up to its last row."""

    seq_id: int
    start: int
    token_ids: tuple[int, ...]
    num_sampled: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """One round on the device. Rows are padded to a multiple of 8; padding is computed and thrown away.

    token_ids, positions: int64 [padded rows]. slots: int64 [rows, kv_heads], where each row's keys and values go (KVCache.store).
    sampled_rows: int64 [padded sampled rows], lane by lane; the first num_sampled of them are real.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    attention: AttentionPlan
    sampled_rows: Tensor
    num_sampled: int


def make_batch(lanes: Sequence[LaneRows], *, block_size: int, num_kv_heads: int, zero_block: int) -> Batch:
    """The round of these lanes, rows in their order."""
    spans: list[LaneSpan] = []
    token_ids: list[int] = []
    positions: list[int] = []
    sampled: list[int] = []
    slots: list[Tensor] = []
    heads = torch.arange(num_kv_heads)
    for lane in lanes:
        end = lane.start + len(lane.token_ids)
        blocks = torch.tensor(lane.block_ids[: -(-end // block_size)])
        assert blocks.shape[0] * block_size >= end, f"sequence {lane.seq_id}: {end} positions, {blocks.shape[0]} blocks"
        spans.append(LaneSpan(len(token_ids), len(lane.token_ids), lane.start, blocks))
        lane_positions = torch.arange(lane.start, end)
        row_blocks, places = blocks[lane_positions // block_size], lane_positions % block_size
        slots.append((row_blocks[:, None] * num_kv_heads + heads) * block_size + places[:, None])
        token_ids += lane.token_ids
        positions += range(lane.start, end)
        sampled += range(len(token_ids) - lane.num_sampled, len(token_ids))
    padding = padded_rows(len(token_ids)) - len(token_ids)
    return Batch(
        token_ids=torch.tensor(token_ids + [0] * padding),
        positions=torch.tensor(positions + [0] * padding),
        slots=torch.cat(slots),
        attention=plan_attention(spans, num_kv_heads=num_kv_heads, block_size=block_size, zero_block=zero_block),
        sampled_rows=torch.tensor(sampled + sampled[:1] * (-len(sampled) % ROW_BLOCK), dtype=torch.int64),
        num_sampled=len(sampled),
    )
