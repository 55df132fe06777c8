"""Paged attention on a GPU: right against float64, and a row's bits its own in every form, cut, company, place and context."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from espalier.kernels.attention import paged
from espalier.kernels.attention.lanes import LaneTable
from espalier.kernels.attention.splits import EVERY_KEY
from espalier.kernels.counters import Scratch
from espalier.kernels.device import device_class
from tests.support.attention_cases import PagedCase, Piece, relative_error

pytestmark = pytest.mark.gpu

CONTEXTS = [1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 4096, 33000]


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    def case(self, lengths: Sequence[int]) -> PagedCase:
        heads, kv_heads, head_dim, block_size, dtype = self
        return PagedCase(lengths, heads, kv_heads, head_dim, block_size=block_size, dtype=dtype, device="cuda")

    @property
    def tolerance(self) -> float:
        return 1e-3 if self.dtype == torch.float16 else 6e-3


SHAPES = [
    Shape(8, 2, 128, 16, torch.float16),
    Shape(4, 4, 64, 128, torch.float16),
    Shape(8, 1, 128, 32, torch.bfloat16),
    Shape(6, 1, 80, 64, torch.bfloat16),
    Shape(16, 1, 256, 16, torch.float16),
]
# Kernels take long to compile and little to run: fewer tests of these.
ODD_SHAPES = [
    Shape(4, 2, 32, 16, torch.bfloat16),
    Shape(12, 4, 96, 64, torch.float16),
    Shape(3, 1, 192, 32, torch.bfloat16),
    Shape(2, 1, 256, 128, torch.bfloat16),
]


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> Shape:
    """A fixture of the module, so that tests of one shape follow each other and compile its kernels once."""
    found: Shape = request.param
    return found


def scratch_for(case: PagedCase, table: LaneTable, heads: int, window: int | None) -> Scratch:
    kv_heads, head_dim = case.keys.shape[1], case.keys.shape[3]
    size = paged.scratch_size(
        device_class(case.keys.device), table.num_lanes, table.max_rows, table.max_context, heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, window=window,
    )  # fmt: skip
    counters = torch.zeros(size.counters, dtype=torch.int32, device="cuda")
    return Scratch(counters, torch.full((size.partials,), math.nan, device="cuda"))


def attend(
    case: PagedCase,
    pieces: Sequence[Piece],
    window: int | None = None,
    *,
    lanes: int | None = None,
    max_context: int | None = None,
    table: LaneTable | None = None,
) -> torch.Tensor:
    """As the engine calls it, twice: output and partial sums NaN before. table: of these pieces, where it is not the plain one."""
    q = case.queries(pieces)
    out = torch.full_like(q, math.nan)
    table = table or case.table(pieces, lanes=lanes, max_context=max_context)
    scratch = scratch_for(case, table, q.shape[1], window)
    for _ in range(2):
        paged.paged_attention(q, case.keys, case.values, table, scratch, scale=case.scale, window=window, out=out)
    return out


def attend_plain(case: PagedCase, pieces: Sequence[Piece], window: int | None = None) -> torch.Tensor:
    from espalier.kernels.attention import plain

    q = case.queries(pieces)
    out = torch.full_like(q, math.nan)
    factor = torch.tensor(case.scale * math.log2(math.e), dtype=torch.float32).item()
    plain.launch(q, case.keys, case.values, case.table(pieces), factor, window or EVERY_KEY, out, min_rows=1)
    return out


def test_decode_rows_match_the_definition(shape: Shape) -> None:
    case = shape.case(CONTEXTS)
    pieces = [Piece(i, length - 1, 1) for i, length in enumerate(CONTEXTS)]
    out = attend(case, pieces)
    for row, piece in zip(out, pieces, strict=True):
        assert relative_error(row[None], case.exact(piece)) < shape.tolerance, piece
    assert torch.equal(attend_plain(case, pieces), out)


def check_prompts(shape: Shape) -> None:
    case = shape.case([700, 1500, 17])
    pieces = [Piece(0, 0, 700), Piece(1, 1000, 500), Piece(2, 0, 17), Piece(1, 1499, 1)]
    out = attend(case, pieces)
    exact = torch.cat([case.exact(piece) for piece in pieces])
    assert relative_error(out, exact) < shape.tolerance
    assert torch.equal(attend_plain(case, pieces), out)


def test_prompt_rows_match_the_definition(shape: Shape) -> None:
    check_prompts(shape)


@pytest.mark.parametrize("odd", ODD_SHAPES, ids=str)
def test_odd_shapes_match_the_definition(odd: Shape) -> None:
    check_prompts(odd)


@pytest.mark.parametrize("window", [None, 1, 128, 700])
def test_a_rows_bits_are_its_own(shape: Shape, window: int | None) -> None:
    length = 2100
    case = shape.case([length, 300, 33])
    whole = attend(case, [Piece(0, 0, length)], window)
    assert relative_error(whole, case.exact(Piece(0, 0, length), window)) < shape.tolerance
    # Chunks of many sizes, in one call and one after the other.
    cuts = [0, 1, 8, 72, 1072, 1073, 1089, 1106, 1599, 1600, 1601, length]
    together = attend(case, case.cut(0, cuts), window)
    assert torch.equal(together, whole)
    for piece in case.cut(0, cuts):
        assert torch.equal(attend(case, [piece], window), whole[piece.start : piece.start + piece.rows]), piece
    # Some rows as decode rows, in company, at two grids.
    for start in range(50, length, 97):
        company = [Piece(1, 299, 1), Piece(0, start, 1), Piece(2, 20, 13), Piece(1, 100, 60)]
        out = attend(case, company, window, lanes=6, max_context=5000 if start % 2 else None)
        assert torch.equal(out[1], whole[start]), start


# Prompts at several places of their contexts, beside decode rows of contexts from one key on; lengths that end within a tile and a split.
MIXED_LENGTHS = [3300, 1200, 77]
MIXED = [
    *(Piece(0, 3299, 1), Piece(1, 0, 700), Piece(2, 40, 17), Piece(0, 1000, 16), Piece(1, 700, 500), Piece(1, 255, 1)),
    *(Piece(2, 0, 2), Piece(0, 0, 1), Piece(0, 2047, 129), Piece(1, 1199, 1), Piece(2, 0, 77), Piece(0, 256, 3)),
]


@pytest.mark.parametrize(("few_rows", "window"), [(1, None), (16, None), (1, 300)])
def test_many_prompts_beside_decode_rows(shape: Shape, few_rows: int, window: int | None) -> None:
    case = shape.case(MIXED_LENGTHS)
    alone = torch.cat([attend(case, [piece], window) for piece in MIXED])
    for lanes, max_context in ((12, None), (70, 9000)):
        table = case.table(MIXED, lanes=lanes, max_context=max_context, num_tiles=700, few_rows=few_rows)
        assert torch.equal(attend(case, MIXED, window, table=table), alone), (lanes, max_context)
    for order in (MIXED[::-1], MIXED[1::2]):
        rows = torch.cat([attend(case, [piece], window) for piece in order])
        table = case.table(order, lanes=70, max_context=9000, few_rows=few_rows)
        assert torch.equal(attend(case, order, window, table=table), rows)


def test_who_does_what_does_not_matter() -> None:
    case = PagedCase(MIXED_LENGTHS, 14, 2, 128, device="cuda")  # seven heads do not divide a tile
    table = case.table(MIXED, lanes=64, max_context=9000, num_tiles=200, few_rows=1)
    out = attend(case, MIXED, table=table)
    assert torch.equal(attend_plain(case, MIXED), out)
    for seed in range(3):
        torch.manual_seed(seed)
        tiles = table.tiles[torch.randperm(table.tiles.shape[0], device="cuda")]
        shares = table.shares[torch.randperm(table.shares.shape[0], device="cuda")]
        assert torch.equal(attend(case, MIXED, table=replace(table, tiles=tiles, shares=shares)), out)


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def test_one_graph_for_many_mixed_rounds() -> None:
    """Lanes and lists are filled in between replays, as the engine does it."""
    case = PagedCase(MIXED_LENGTHS, 8, 2, 128, device="cuda")
    rounds = [MIXED, MIXED[1:2], MIXED[:1], MIXED[3:9], [Piece(1, 0, 1200)], [Piece(0, 500 * i, 1) for i in range(6)]]
    tables = [case.table(pieces, lanes=16, max_context=20000, num_tiles=150, few_rows=1) for pieces in rounds]
    held = replace(tables[0], min_rows=1, max_rows=2048)
    q = torch.zeros(2048, 8, 128, dtype=torch.float16, device="cuda")
    out = torch.empty_like(q)
    scratch = scratch_for(case, held, 8, None)

    def run() -> None:
        paged.paged_attention(q, case.keys, case.values, held, scratch, scale=case.scale, out=out)

    graph = captured(run)
    for pieces, table in zip(rounds, tables, strict=True):
        for name in ("first_row", "num_rows", "start", "block_tables", "tiles", "shares"):
            getattr(held, name).copy_(getattr(table, name))
        rows = case.queries(pieces)
        q[: rows.shape[0]].copy_(rows)
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out[: rows.shape[0]], torch.cat([attend(case, [piece]) for piece in pieces]))
        assert out[rows.shape[0] :].isnan().all()


@pytest.mark.parametrize("rows", [2, 8, 16])
def test_draft_rows_are_decode_rows(rows: int) -> None:
    case = PagedCase([1200], 8, 2, 128, device="cuda")
    for start in (0, 250, 1024, 1200 - rows):
        drafted = attend(case, [Piece(0, start, rows)])
        single = torch.cat([attend(case, [Piece(0, start + i, 1)]) for i in range(rows)])
        assert torch.equal(drafted, single), start


def test_where_blocks_lie_does_not_matter() -> None:
    lengths = [1000, 513]
    case = PagedCase(lengths, 8, 2, 128, device="cuda")
    pieces = [Piece(0, 600, 400), Piece(1, 512, 1)]
    out = attend(case, pieces)
    moved = torch.randperm(case.keys.shape[0], device="cuda")
    case.keys, case.values = case.keys[moved], case.values[moved]
    case.blocks = [torch.argsort(moved)[blocks] for blocks in case.blocks]
    assert torch.equal(attend(case, pieces), out)


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_captured_equals_eager_at_every_length(rows: int) -> None:
    """One graph, replayed as the context grows."""
    case = PagedCase([3000], 8, 2, 128, device="cuda")
    q = torch.empty_like(case.queries([Piece(0, 0, rows)]))
    out = torch.empty_like(q)
    table = case.table([Piece(0, 3000 - rows, rows)])
    scratch = scratch_for(case, table, q.shape[1], None)

    def run() -> None:
        paged.paged_attention(q, case.keys, case.values, table, scratch, scale=case.scale, out=out)

    graph = captured(run)
    for start in (0, 1, 255, 256, 1111, 3000 - rows):
        piece = Piece(0, start, rows)
        q.copy_(case.queries([piece]))
        table.start.fill_(start)
        out.fill_(math.nan)
        graph.replay()
        assert torch.equal(out, attend(case, [piece])), start


def test_other_types_of_queries_are_rounded_to_the_caches() -> None:
    case = PagedCase([600], 8, 2, 128, dtype=torch.bfloat16, device="cuda")
    pieces = [Piece(0, 599, 1), Piece(0, 100, 400)]
    rounded = attend(case, pieces)
    case.q = [q.float() * 1.0001 for q in case.q]
    q32 = case.queries(pieces)
    assert not torch.equal(q32, q32.bfloat16().float())
    case.q = [q.bfloat16().float() for q in case.q]
    assert torch.equal(attend(case, pieces).bfloat16(), rounded)
