"""What a captured round computes from its few inputs: kernels against their definitions, the definition against a round told by hand."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.support.interpret import interpreted
from tests.support.sass import compile_kernel, needs_triton

UNTOUCHED = -77


@dataclass(frozen=True)
class Sizes:
    """drawing: lanes that have a sampled row. A lane in five has no slot and no rows; padding follows the last row and the last sample."""

    rows: int
    lanes: int
    samples: int
    blocks: int
    slots: int = 7
    max_blocks: int = 40
    block_size: int = 16


SIZES = [
    Sizes(1, 1, 1, 40),
    Sizes(37, 5, 8, 13),
    Sizes(300, 6, 3, 40),
    Sizes(600, 1, 0, 1),
    Sizes(64, 64, 300, 5, slots=80),
]


def some_inputs(sizes: Sizes) -> dict[str, object]:
    """Fields of a RoundInputs, on the CPU."""
    lanes, rows = sizes.lanes, sizes.rows
    live = torch.rand(lanes) < 0.8
    live[0] = True
    lane_slot = torch.randperm(max(sizes.slots, lanes))[:lanes] % sizes.slots
    lane_slot[~live] = -1
    room = rows - rows // 4
    cuts = torch.randint(0, room + 1, (lanes,)).sort().values
    cuts[-1] = room
    row_lane, first_row = torch.full((rows,), -1), torch.zeros(lanes, dtype=torch.int64)
    first = 0
    for lane in range(lanes):
        first_row[lane] = first
        if live[lane]:
            row_lane[first : cuts[lane]] = lane
            first = max(first, int(cuts[lane]))
    longest = sizes.max_blocks * sizes.block_size - rows
    given = torch.randint(0, 1000, (rows,))
    given[::3] = -1 - torch.randint(0, 12, given[::3].shape)  # 10 tokens are drawn
    given[row_lane < 0] = 5
    sampled = torch.randint(0, rows, (sizes.samples,))
    sampled[sizes.samples - sizes.samples // 3 :] = -1
    fields = {
        "row_lane": row_lane, "given": given, "drawn": torch.randint(1000, 2000, (10,)), "lane_slot": lane_slot, "first_row": first_row,
        "start": torch.randint(0, max(1, longest), (lanes,)), "observes": torch.randint(0, 2, (lanes,)) * 3, "sampled_rows": sampled,
        "tables": torch.randint(0, 2**31 // sizes.block_size, (sizes.slots, sizes.max_blocks)),
    }  # fmt: skip
    return {**{name: x.int() for name, x in fields.items()}, "block_size": sizes.block_size}


def moved(fields: dict[str, object], device: str) -> dict[str, object]:
    """The tensors as views of one buffer on the device, at any address: a round's inputs are packed so."""
    out, buffer = dict(fields), torch.full((1 << 15,), UNTOUCHED, dtype=torch.int32, device=device)
    place = 1
    for name, x in fields.items():
        if isinstance(x, Tensor):
            out[name] = buffer[place : place + x.numel()].view(x.shape).copy_(x)
            place += x.numel()
    return out


def check_layout(device: str, sizes: Sizes) -> None:
    from espalier.kernels.round import reference
    from espalier.kernels.round.layout import RoundInputs, RoundLayout, lay_out

    fields = some_inputs(sizes)
    got, want = (RoundLayout.empty(sizes.rows, sizes.lanes, sizes.samples, sizes.blocks, d) for d in (device, "cpu"))
    for layout in (got, want):
        for field in dataclasses.fields(layout):
            getattr(layout, field.name).fill_(UNTOUCHED)
    lay_out(RoundInputs(**moved(fields, device)), got)  # type: ignore[arg-type]
    reference.lay_out(RoundInputs(**fields), want)  # type: ignore[arg-type]
    for field in dataclasses.fields(want):
        assert torch.equal(getattr(got, field.name).cpu(), getattr(want, field.name)), field.name


def round_by_hand() -> tuple[dict[str, object], dict[str, list[object]]]:
    """Lane 0: slot 2 decodes at position 5, a drawn token; lane 1: none; lane 2: slot 0, three rows of a prompt from position 3 on."""
    inputs = {
        "row_lane": [0, 2, 2, 2, -1], "given": [-2, 7, 8, -9, 99], "drawn": [50, 60, 70], "lane_slot": [2, -1, 0], "first_row": [0, 0, 1],
        "start": [5, 0, 3], "observes": [1, 1, 0], "sampled_rows": [3, 0, -1], "tables": [[10, 11, 12], [0, 0, 0], [20, 21, 22]],
    }  # fmt: skip
    outputs: dict[str, list[object]] = {
        "token_ids": [60, 7, 8, -1, 0], "positions": [5, 3, 4, 5, 0], "kv_slots": [85, 43, 44, 45, -1], "history_slot": [2, -1, -1, -1, -1],
        "block_tables": [[20, 21], [UNTOUCHED] * 2, [10, 11]], "gather_rows": [3, 0, 0], "draw_slot": [0, 2, -1], "draw_positions": [6, 6, 0],
    }  # fmt: skip
    return {**{name: torch.tensor(x, dtype=torch.int32) for name, x in inputs.items()}, "block_size": 4}, outputs


@interpreted
def test_a_round_told_by_hand() -> None:
    from espalier.kernels.round import reference
    from espalier.kernels.round.layout import RoundInputs, RoundLayout, lay_out

    fields, outputs = round_by_hand()
    for call in (reference.lay_out, lay_out):
        layout = RoundLayout.empty(5, 3, 3, 2, "cpu")
        layout.block_tables.fill_(UNTOUCHED)
        call(RoundInputs(**fields), layout)  # type: ignore[arg-type]
        assert {name: getattr(layout, name).tolist() for name in outputs} == outputs


@interpreted
def test_a_position_behind_the_table_has_no_place() -> None:
    from espalier.kernels.round import reference
    from espalier.kernels.round.layout import RoundInputs, RoundLayout, lay_out

    fields, _ = round_by_hand()
    fields["start"] = torch.tensor([12, 0, 10], dtype=torch.int32)
    for call in (reference.lay_out, lay_out):
        layout = RoundLayout.empty(5, 3, 3, 2, "cpu")
        call(RoundInputs(**fields), layout)  # type: ignore[arg-type]
        assert layout.kv_slots.tolist() == [-1, 50, 51, -1, -1] and layout.positions.tolist() == [12, 10, 11, 12, 0]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@interpreted
def test_lay_out_interpreted(sizes: Sizes) -> None:
    for _ in range(4):
        check_layout("cpu", sizes)


@interpreted
def test_what_does_not_fit_is_named() -> None:
    from espalier.kernels.round.layout import RoundInputs, RoundLayout, lay_out

    fields, _ = round_by_hand()
    layout = RoundLayout.empty(5, 3, 3, 2, "cpu")
    for name, value in (
        ("given", torch.zeros(4, dtype=torch.int32)),
        ("start", torch.zeros(3, dtype=torch.int64)),
        ("drawn", torch.zeros(6, dtype=torch.int32)[::2]),
        ("tables", torch.zeros(3, 1, dtype=torch.int32)),
        ("block_size", 12),
    ):
        with pytest.raises(ValueError, match="block_tables must" if name == "tables" else f"{name} must"):
            lay_out(RoundInputs(**{**fields, name: value}), layout)  # type: ignore[arg-type]
    for field in dataclasses.fields(layout):
        wrong = dataclasses.replace(layout, **{field.name: getattr(layout, field.name).float()})
        with pytest.raises(ValueError, match=f"{field.name} must"):
            lay_out(RoundInputs(**fields), wrong)  # type: ignore[arg-type]


def check_updates(device: str, count: int) -> None:
    from espalier.kernels.round import reference
    from espalier.kernels.round.updates import apply_updates

    tables = torch.randint(0, 1000, (9, 50), dtype=torch.int32)
    updates = torch.stack([torch.randperm(600)[:count] - 75, torch.randint(0, 1000, (count,))], dim=1).int()
    guarded = torch.full((11, 50), UNTOUCHED, dtype=torch.int32, device=device)
    guarded[1:-1] = tables
    apply_updates(torch.cat([updates[:1], updates]).to(device)[1:], guarded[1:-1])
    reference.apply_updates(updates, tables)
    assert torch.equal(guarded[1:-1].cpu(), tables)
    assert (guarded[[0, -1]] == UNTOUCHED).all()


@interpreted
def test_apply_updates_interpreted() -> None:
    for count in (0, 1, 130, 600):
        check_updates("cpu", count)


@interpreted
def test_updates_that_do_not_fit_are_named() -> None:
    from espalier.kernels.round.updates import apply_updates

    tables = torch.zeros(3, 4, dtype=torch.int32)
    for updates, into, name in (
        (torch.zeros(2, 3, dtype=torch.int32), tables, "updates must"),
        (torch.zeros(2, 2), tables, "updates must"),
        (torch.zeros(2, 2, dtype=torch.int32), tables.T, "tables must"),
    ):
        with pytest.raises(ValueError, match=name):
            apply_updates(updates, into)


def check_kept(device: str, count: int, size: int, place: int) -> None:
    from espalier.kernels.round import reference
    from espalier.kernels.round.drawn import keep_drawn

    token_ids, drawn = torch.randint(0, 1000, (count,), dtype=torch.int32), torch.arange(size, dtype=torch.int32)
    guarded = torch.full((size + 2,), UNTOUCHED, dtype=torch.int32, device=device)
    guarded[1:-1] = drawn
    at = torch.tensor([0, place], dtype=torch.int32)
    keep_drawn(token_ids.to(device), at.to(device)[1:], guarded[1:-1])
    reference.keep_drawn(token_ids, at[1:], drawn)
    assert torch.equal(guarded[1:-1].cpu(), drawn)
    assert (guarded[[0, -1]] == UNTOUCHED).all()


KEPT = [(0, 8, 2), (3, 8, 2), (8, 8, 0), (4, 8, 6), (4, 8, 8), (4, 8, -2), (300, 200, 1), (2, 8, 2**31 - 1)]


@interpreted
def test_keep_drawn_interpreted() -> None:
    for case in KEPT:
        check_kept("cpu", *case)


@interpreted
def test_drawn_tokens_that_do_not_fit_are_named() -> None:
    from espalier.kernels.round.drawn import keep_drawn

    token_ids, place, drawn = (torch.zeros(n, dtype=torch.int32) for n in (2, 1, 4))
    for arguments, name in (
        ((token_ids.long(), place, drawn), "token_ids must"),
        ((token_ids, drawn, drawn), "place must"),
        ((token_ids, place, drawn[::2]), "drawn must"),
    ):
        with pytest.raises(ValueError, match=name):
            keep_drawn(*arguments)


@interpreted
def test_a_layout_says_what_a_history_observes() -> None:
    from espalier.kernels.round.layout import RoundInputs, RoundLayout, lay_out
    from espalier.kernels.sampling.history import empty_history, observe

    fields, _ = round_by_hand()
    layout, seen = RoundLayout.empty(5, 3, 3, 2, "cpu"), empty_history(3, 100, "cpu")
    lay_out(RoundInputs(**{**fields, "observes": torch.ones(3, dtype=torch.int32)}), layout)  # type: ignore[arg-type]
    observe(layout.token_ids, layout.history_slot, layout.positions, torch.tensor([4, 0, 6], dtype=torch.int32), seen)
    # Slot 2 drew token 60 within its prompt; slot 0 has token 7 in its prompt, 8 in its reply; a token drawn nowhere is none.
    assert {tuple(at): int(seen[tuple(at)]) for at in seen.nonzero().tolist()} == {(2, 60): 1, (0, 7): 1, (0, 8): 2}


@needs_triton
def test_they_compile_without_a_stack() -> None:
    from espalier.kernels.round.drawn import _keep_drawn_kernel
    from espalier.kernels.round.layout import _lay_out_kernel
    from espalier.kernels.round.updates import _apply_updates_kernel

    for kernel in (_lay_out_kernel, _apply_updates_kernel, _keep_drawn_kernel):
        constants = {name: n for name, n in {"BLOCK_SIZE": 16, "BLOCK": 256}.items() if name in kernel.arg_names}
        numbers = [name for name in kernel.arg_names if name.startswith(("num_", "max_", "size"))]
        types = dict.fromkeys(set(kernel.arg_names) - set(constants), "*i32")
        types.update(dict.fromkeys(numbers, "i32"))
        if "kv_slots" in types:
            types["kv_slots"] = "*i64"
        assert compile_kernel(kernel, types, constants, 90, num_warps=4).stack == 0


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_lay_out(sizes: Sizes) -> None:
    for _ in range(4):
        check_layout("cuda", sizes)


@pytest.mark.gpu
def test_updates_and_drawn_tokens() -> None:
    for count in (0, 1, 130, 600):
        check_updates("cuda", count)
    for case in KEPT:
        check_kept("cuda", *case)


@pytest.mark.gpu
def test_one_graph_serves_every_round() -> None:
    """The layout of a captured round follows its inputs; what it draws is the next replay's token."""
    from espalier.kernels.round import reference
    from espalier.kernels.round.drawn import keep_drawn
    from espalier.kernels.round.layout import RoundInputs, RoundLayout, lay_out

    sizes = Sizes(64, 6, 10, 13)
    fields = moved(some_inputs(sizes), "cuda")
    inputs, place = RoundInputs(**fields), torch.zeros(1, dtype=torch.int32, device="cuda")  # type: ignore[arg-type]
    layout = RoundLayout.empty(sizes.rows, sizes.lanes, sizes.samples, sizes.blocks, "cuda")

    def one_round() -> None:
        lay_out(inputs, layout)
        keep_drawn(layout.token_ids, place, inputs.drawn)

    one_round()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_round()
    want = RoundLayout.empty(sizes.rows, sizes.lanes, sizes.samples, sizes.blocks, "cpu")
    for at in (0, 3, -1, 9):
        for name, x in some_inputs(sizes).items():
            if isinstance(x, Tensor) and name != "drawn":
                getattr(inputs, name).copy_(x)
        for remade in (layout, want):
            for field in dataclasses.fields(remade):
                getattr(remade, field.name).fill_(UNTOUCHED)
        place.fill_(at)
        before = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in dataclasses.asdict(inputs).items()}
        graph.replay()
        reference.lay_out(RoundInputs(**before), want)  # type: ignore[arg-type]
        reference.keep_drawn(want.token_ids, place.cpu(), before["drawn"])
        for field in dataclasses.fields(want):
            assert torch.equal(getattr(layout, field.name).cpu(), getattr(want, field.name)), field.name
        assert torch.equal(inputs.drawn.cpu(), before["drawn"])
