"""What the kernels of a round need to know of every row, from the little that the host says of it: kernel and launcher.

The host names lanes, their first rows and starts; tokens that are still being drawn and block tables are on the device already. All integers,
one launch, nothing read by the host: a captured round begins with it. Knows neither requests nor graphs.
"""

# Constexprs are written in capitals; device functions have no types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from espalier.kernels.round.integers import require_integers

_BLOCK = 256  # rows, samples or table entries of a program


@dataclass(frozen=True, slots=True)
class RoundInputs:
    """One round, as the host tells it and as the device remembers it; int32, each contiguous.

    row_lane: [rows], the lane of the round that a row belongs to; -1: padding.
    given: [rows], a row's token id, or -1 - i: the token at drawn[i]. drawn: [any], tokens of earlier rounds (`drawn.py`).
    lane_slot, first_row, start, observes: [lanes]. A lane is the sequence of slot lane_slot (-1: none) from position start on, in the rows
    from first_row on; observes is not zero where its draws depend on its history.
    sampled_rows: [samples], rows whose logits are drawn from; -1: padding.
    tables: [slots, max_blocks], entry j of a slot is the cache block of its positions j * block_size ...
    """

    row_lane: Tensor
    given: Tensor
    drawn: Tensor
    lane_slot: Tensor
    first_row: Tensor
    start: Tensor
    observes: Tensor
    sampled_rows: Tensor
    tables: Tensor
    block_size: int


@dataclass(frozen=True, slots=True)
class RoundLayout:
    """What follows for each row, lane and sample; int32 but for kv_slots, each contiguous.

    token_ids, positions: [rows]; 0 for padding. A token that was drawn nowhere is -1, which no vocabulary has.
    kv_slots: int64 [rows], block * block_size + place in the block; -1 for padding, and where a slot's table has no such block.
    history_slot: [rows], the slot whose history the token belongs to; -1 for padding and for lanes that do not observe.
    block_tables: [lanes, blocks], the first entries of each lane's table; not written for a lane without a slot.
    gather_rows: [samples], the row; 0 for padding. draw_slot: [samples], its lane's slot; -1 for padding.
    draw_positions: [samples], the position that the drawn token will have; 0 for padding.
    """

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    history_slot: Tensor
    block_tables: Tensor
    gather_rows: Tensor
    draw_slot: Tensor
    draw_positions: Tensor

    @staticmethod
    def empty(rows: int, lanes: int, samples: int, blocks: int, device: torch.device | str) -> "RoundLayout":
        """Room for a round of these sizes; blocks: entries of a lane's table, as many as its longest context needs."""

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return RoundLayout(
            token_ids=integers(rows),
            positions=integers(rows),
            kv_slots=integers(rows, dtype=torch.int64),
            history_slot=integers(rows),
            block_tables=integers(lanes, blocks),
            gather_rows=integers(samples),
            draw_slot=integers(samples),
            draw_positions=integers(samples),
        )


@triton.jit
def _places(row_lane, lane_slot, first_row, start, row, mask):
    # lane, slot (-1: none) and position of rows; the position means nothing without a lane
    lane = tl.load(row_lane + row, mask=mask, other=-1)
    live = lane >= 0
    slot = tl.load(lane_slot + lane, mask=live, other=-1)
    position = tl.load(start + lane, mask=live, other=0) + row - tl.load(first_row + lane, mask=live, other=0)
    return lane, slot, position


@triton.jit
def _lay_out_rows(
    row, num_rows, row_lane, given, drawn, lane_slot, first_row, start, observes, tables,
    token_ids, positions, kv_slots, history_slot, num_drawn, max_blocks, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    inside = row < num_rows
    lane, slot, position = _places(row_lane, lane_slot, first_row, start, row, inside)
    live = lane >= 0
    token = tl.load(given + row, mask=live, other=0)
    place = -1 - token
    token = tl.where(token < 0, tl.load(drawn + place, mask=(place >= 0) & (place < num_drawn), other=-1), token)
    tl.store(token_ids + row, token, mask=inside)
    tl.store(positions + row, tl.where(live, position, 0), mask=inside)
    observed = tl.load(observes + lane, mask=live, other=0) != 0
    tl.store(history_slot + row, tl.where(observed, slot, -1), mask=inside)
    index = position // BLOCK_SIZE
    stored = (slot >= 0) & (position >= 0) & (index < max_blocks)
    block = tl.load(tables + slot.to(tl.int64) * max_blocks + index, mask=stored, other=0).to(tl.int64)
    tl.store(kv_slots + row, tl.where(stored, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), mask=inside)


@triton.jit
def _lay_out_samples(
    sample, num_samples, row_lane, lane_slot, first_row, start, sampled_rows, gather_rows, draw_slot, draw_positions
):
    inside = sample < num_samples
    row = tl.load(sampled_rows + sample, mask=inside, other=-1)
    lane, slot, position = _places(row_lane, lane_slot, first_row, start, row, row >= 0)
    tl.store(gather_rows + sample, tl.maximum(row, 0), mask=inside)
    tl.store(draw_slot + sample, slot, mask=inside)
    tl.store(draw_positions + sample, tl.where(lane >= 0, position + 1, 0), mask=inside)


@triton.jit
def _copy_table(lane, column, lane_slot, tables, block_tables, num_blocks, max_blocks):
    slot = tl.load(lane_slot + lane).to(tl.int64)
    inside = (column < num_blocks) & (slot >= 0)
    entry = tl.load(tables + slot * max_blocks + column, mask=inside, other=0)
    tl.store(block_tables + lane * num_blocks + column, entry, mask=inside)


# What is a part of a round's packed inputs stands at any address, and sizes differ from graph to graph: one program serves them all.
@triton.jit(
    do_not_specialize=[
        "row_lane", "given", "drawn", "lane_slot", "first_row", "start", "observes", "sampled_rows",
        "num_rows", "num_samples", "num_drawn", "num_blocks", "max_blocks",
    ]
)  # fmt: skip
def _lay_out_kernel(
    row_lane, given, drawn, lane_slot, first_row, start, observes, sampled_rows, tables,
    token_ids, positions, kv_slots, history_slot, block_tables, gather_rows, draw_slot, draw_positions,
    num_rows, num_samples, num_drawn, num_blocks, max_blocks, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # First the programs of rows, then those of samples, then those of lanes, each of a part of a table.
    program, i = tl.program_id(0), tl.arange(0, BLOCK)
    first_sample = tl.cdiv(num_rows, BLOCK)
    first_lane = first_sample + tl.cdiv(num_samples, BLOCK)
    if program < first_sample:
        _lay_out_rows(
            program * BLOCK + i, num_rows, row_lane, given, drawn, lane_slot, first_row, start, observes, tables,
            token_ids, positions, kv_slots, history_slot, num_drawn, max_blocks, BLOCK_SIZE,
        )  # fmt: skip
    elif program < first_lane:
        _lay_out_samples(
            (program - first_sample) * BLOCK + i, num_samples, row_lane, lane_slot, first_row, start, sampled_rows,
            gather_rows, draw_slot, draw_positions,
        )  # fmt: skip
    else:
        parts = tl.cdiv(num_blocks, BLOCK)
        lane, part = (program - first_lane) // parts, (program - first_lane) % parts
        _copy_table(lane, part * BLOCK + i, lane_slot, tables, block_tables, num_blocks, max_blocks)


def lay_out(inputs: RoundInputs, layout: RoundLayout) -> None:
    """Writes every field of `layout` from `inputs`; see there. Sizes are the tensors'.

    Lanes that rows name, rows that samples name and slots that lanes name must exist. Raises ValueError naming what does not fit.
    """
    _check(inputs, layout)
    rows, samples = inputs.row_lane.shape[0], inputs.sampled_rows.shape[0]
    lanes, blocks = layout.block_tables.shape
    programs = triton.cdiv(rows, _BLOCK) + triton.cdiv(samples, _BLOCK) + lanes * triton.cdiv(blocks, _BLOCK)
    if programs == 0:
        return
    _lay_out_kernel[(programs,)](
        inputs.row_lane, inputs.given, inputs.drawn, inputs.lane_slot, inputs.first_row, inputs.start, inputs.observes,
        inputs.sampled_rows, inputs.tables,
        layout.token_ids, layout.positions, layout.kv_slots, layout.history_slot, layout.block_tables,
        layout.gather_rows, layout.draw_slot, layout.draw_positions,
        rows, samples, inputs.drawn.shape[0], blocks, inputs.tables.shape[1],
        BLOCK_SIZE=inputs.block_size, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


def _check(inputs: RoundInputs, layout: RoundLayout) -> None:
    rows, lanes, samples = (x.shape[0] for x in (inputs.row_lane, inputs.lane_slot, inputs.sampled_rows))
    for name in ("row_lane", "given"):
        require_integers(name, getattr(inputs, name), rows)
    for name in ("lane_slot", "first_row", "start", "observes"):
        require_integers(name, getattr(inputs, name), lanes)
    require_integers("sampled_rows", inputs.sampled_rows, samples)
    require_integers("drawn", inputs.drawn, inputs.drawn.shape[0])
    require_integers("tables", inputs.tables, *inputs.tables.shape)
    if inputs.block_size < 1 or inputs.block_size & (inputs.block_size - 1):
        raise ValueError(f"block_size must be a power of two, not {inputs.block_size}")
    for name in ("token_ids", "positions", "history_slot"):
        require_integers(name, getattr(layout, name), rows)
    require_integers("kv_slots", layout.kv_slots, rows, dtype=torch.int64)
    blocks = min(layout.block_tables.shape[1], inputs.tables.shape[1])
    require_integers("block_tables", layout.block_tables, lanes, blocks)
    for name in ("gather_rows", "draw_slot", "draw_positions"):
        require_integers(name, getattr(layout, name), samples)
