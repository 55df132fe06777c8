"""Paged attention for GPUs, on the CPU: the split rule, what is refused, and the plain Triton form as the interpreter runs it."""

import math
from dataclasses import replace

import pytest
import torch

from espalier.kernels.attention import paged
from espalier.kernels.attention.splits import SPLIT_KEYS, TILE_KEYS, most_splits
from espalier.kernels.counters import Scratch
from espalier.kernels.device import DeviceClass
from tests.support.attention_cases import PagedCase, Piece, relative_error
from tests.support.interpret import interpreted

NO_SCRATCH = Scratch(torch.zeros(0, dtype=torch.int32), torch.zeros(0))


def attend(case: PagedCase, pieces: list[Piece], window: int | None = None, lanes: int | None = None) -> torch.Tensor:
    """Output rows of the pieces, in a buffer that was NaN before."""
    q = case.queries(pieces)
    out = torch.full((q.shape[0] + 1, *q.shape[1:]), math.nan, dtype=q.dtype)
    table = case.table(pieces, lanes=lanes)
    paged.paged_attention(
        q, case.keys, case.values, table, NO_SCRATCH, scale=case.scale, window=window, out=out[: q.shape[0]]
    )
    assert out[-1].isnan().all()
    return out[:-1]


@pytest.mark.parametrize(
    ("context", "rows", "window", "splits"),
    [
        (1, 1, None, 1),
        (256, 1, None, 1),
        (257, 1, None, 2),
        (32768, 1, None, 128),
        (32768, 1, 1, 1),
        (32768, 1, 2, 2),
        (32768, 1, 257, 2),
        (32768, 1, 258, 3),
        (300, 1, 1000, 2),
        (32768, 2, 1, 2),
        (32768, 16, 512, 4),
    ],
)
def test_most_splits(context: int, rows: int, window: int | None, splits: int) -> None:
    assert most_splits(context, rows, window) == splits


@pytest.mark.parametrize("window", [1, 2, 100, 255, 256, 257, 258, 600])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_no_place_needs_more_than_most_splits(window: int, rows: int) -> None:
    needed = 0
    for start in range(2 * SPLIT_KEYS + window):
        first, last = max(0, start - window + 1) // SPLIT_KEYS, (start + rows - 1) // SPLIT_KEYS
        needed = max(needed, last - first + 1)
    assert needed == most_splits(1 << 20, rows, window)


def test_a_split_is_whole_tiles() -> None:
    assert SPLIT_KEYS % TILE_KEYS == 0


def test_the_plain_form_needs_no_scratch() -> None:
    size = paged.scratch_size(DeviceClass(triton=True), 4, 16, 4096, heads=8, kv_heads=2, head_dim=64)
    assert (size.counters, size.partials) == (0, 0)


def test_refusals_name_the_argument() -> None:
    case = PagedCase([20], 4, 2, 32)
    q = case.queries([Piece(0, 0, 20)])
    table = case.table([Piece(0, 0, 20)])
    good = {"q": q, "keys": case.keys, "values": case.values, "lanes": table, "out": torch.empty_like(q)}
    bad = [
        ("q", {"q": q[..., ::2]}),
        ("keys", {"keys": case.keys.float(), "values": case.values.float()}),
        ("keys", {"values": case.values[:-1]}),
        ("head_dim", {"q": q[..., :16].contiguous(), "out": torch.empty(20, 4, 16)}),
        ("block_size", {"keys": case.keys[:, :, :8].contiguous(), "values": case.values[:, :, :8].contiguous()}),
        ("heads", {"q": q[:, :3].contiguous(), "out": torch.empty(20, 3, 32)}),
        ("out", {"out": torch.empty(19, 4, 32)}),
        ("window", {"window": 0}),
        ("lanes.start", {"lanes": replace(table, start=table.start.long())}),
        ("lanes.block_tables", {"lanes": replace(table, block_tables=table.block_tables[:, :1])}),
        ("lanes.few_rows", {"lanes": replace(table, few_rows=17)}),
        ("lanes.tiles", {"lanes": replace(table, tiles=table.tiles[:0])}),
        ("lanes.tiles", {"lanes": replace(table, tiles=table.tiles.long())}),
        ("lanes.shares", {"lanes": replace(table, shares=table.shares[:, :2])}),
        ("lanes.shares", {"lanes": replace(table, shares=table.shares[:0])}),
    ]
    for name, change in bad:
        with pytest.raises(ValueError, match=f"^{name}"):
            paged.paged_attention(scratch=NO_SCRATCH, scale=1.0, **{**good, **change})


# bf16 is the GPU tests' matter: Triton's interpreter multiplies bf16 matrices as if their bits were integers.
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"), [(2, 2, 64, 16), (4, 1, 32, 32), (3, 1, 80, 16), (2, 1, 128, 128)]
)
@interpreted
def test_matches_the_definition(heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    case = PagedCase([300, 1, 130], heads, kv_heads, head_dim, block_size=block_size)
    pieces = [Piece(0, 260, 40), Piece(1, 0, 1), Piece(2, 129, 1)]
    out = attend(case, pieces)
    exact = torch.cat([case.exact(piece) for piece in pieces])
    assert relative_error(out, exact) < 1e-3


@pytest.mark.parametrize("window", [None, 1, 100])
@interpreted
def test_a_rows_bits_are_its_own(window: int | None) -> None:
    case = PagedCase([290, 40], 4, 2, 32)
    first = 240
    whole = attend(case, [Piece(0, first, 50)], window)
    exact = case.exact(Piece(0, first, 50), window)
    assert relative_error(whole, exact) < 1e-3
    for borders in ([240, 241, 257, 290], [240, 256, 273, 274, 290]):
        assert torch.equal(attend(case, case.cut(0, borders), window), whole)
    # Behind another lane, before lanes without rows, at other blocks.
    assert torch.equal(attend(case, [Piece(1, 30, 10), Piece(0, 250, 40)], window, lanes=4)[10:], whole[10:])
    moved = torch.arange(case.keys.shape[0]).flip(0)
    case.keys, case.values = case.keys[moved], case.values[moved]
    case.blocks = [case.keys.shape[0] - 1 - blocks for blocks in case.blocks]
    assert torch.equal(attend(case, [Piece(0, first, 50)], window), whole)
