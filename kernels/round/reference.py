"""What a captured round computes from its few inputs, in plain PyTorch: the definition. The fields' meaning is told in `layout.py`."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # the launcher's file needs Triton
    from espalier.kernels.round.layout import RoundInputs, RoundLayout


def apply_updates(updates: Tensor, tables: Tensor) -> None:
    """As `updates.apply_updates`."""
    flat = tables.view(-1)
    places = updates[:, 0].long()
    here = (places >= 0) & (places < flat.numel())
    flat[places[here]] = updates[here, 1]


def keep_drawn(token_ids: Tensor, place: Tensor, drawn: Tensor) -> None:
    """As `drawn.keep_drawn`."""
    first = int(place)
    if 0 <= first < drawn.numel():
        kept = token_ids[: drawn.numel() - first]
        drawn[first : first + kept.numel()] = kept


def lay_out(inputs: "RoundInputs", layout: "RoundLayout") -> None:
    """As `layout.lay_out`."""
    rows = torch.arange(inputs.row_lane.shape[0], dtype=torch.int32, device=inputs.row_lane.device)
    slots, positions, live = _places(inputs, rows)
    layout.token_ids.copy_(_tokens(inputs).masked_fill(~live, 0))
    layout.positions.copy_(positions.masked_fill(~live, 0))
    layout.kv_slots.copy_(_kv_slots(inputs, slots, positions))
    observed = live & (inputs.observes[inputs.row_lane.clamp(min=0)] != 0)
    layout.history_slot.copy_(slots.masked_fill(~observed, -1))

    used = inputs.lane_slot >= 0
    layout.block_tables[used] = inputs.tables[inputs.lane_slot[used], : layout.block_tables.shape[1]]

    sampled = inputs.sampled_rows >= 0
    gathered = inputs.sampled_rows.clamp(min=0)
    slots, positions, live = _places(inputs, gathered)
    layout.gather_rows.copy_(gathered)
    layout.draw_slot.copy_(slots.masked_fill(~sampled, -1))
    layout.draw_positions.copy_((positions + 1).masked_fill(~(sampled & live), 0))


def _places(inputs: "RoundInputs", rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slot (-1: none), position, and whether it belongs to a lane, of each of these rows."""
    lane = inputs.row_lane[rows]
    live, lane = lane >= 0, lane.clamp(min=0)
    positions = inputs.start[lane] + rows - inputs.first_row[lane]
    return inputs.lane_slot[lane].masked_fill(~live, -1), positions, live


def _tokens(inputs: "RoundInputs") -> Tensor:
    """Each row's token, where it is given or where it was drawn; -1 for one that was drawn nowhere."""
    places = -1 - inputs.given
    there = (places >= 0) & (places < inputs.drawn.numel())
    drawn = torch.full_like(inputs.given, -1)
    drawn[there] = inputs.drawn[places[there]]
    return torch.where(inputs.given >= 0, inputs.given, drawn)


def _kv_slots(inputs: "RoundInputs", slots: Tensor, positions: Tensor) -> Tensor:
    blocks = positions // inputs.block_size
    there = (slots >= 0) & (positions >= 0) & (blocks < inputs.tables.shape[1])
    places = torch.full(slots.shape, -1, dtype=torch.int64, device=slots.device)
    block = inputs.tables[slots[there], blocks[there]].long()
    places[there] = block * inputs.block_size + positions[there] % inputs.block_size
    return places
