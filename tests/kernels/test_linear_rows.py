"""The row forms without a GPU: how launches are cut, and what the kernels compile to for the cards that run them."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803 (compile-time constants of kernels are in capitals, as Triton's own are)

import dataclasses
import importlib.util
import itertools
from typing import Any

import pytest
import torch

from espalier.kernels.device import DeviceClass
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import RATES
from espalier.kernels.linear.group import LinearGroup, Run, pack_group
from espalier.kernels.linear.rows_launch import (
    RowsShape,
    evenly,
    launch_grid,
    member_ends,
    mma_register_cap,
    mma_shape,
    num_token_blocks,
    register_cap,
    scratch_for,
    wgmma_shape,
)
from espalier.kernels.linear.splits import num_splits, split_borders
from tests.support.linears import POINTERS, random_linear
from tests.support.sass import READS, WRITES, MachineCode, compile_kernel, needs_triton

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    from espalier.kernels.linear import rows_mma, rows_wgmma

HOPPER = DeviceClass((9, 0), 132, 232448, triton=True, gluon=True)
ARCHITECTURES = (80, 86, 89, 90, 120, 121)
UNREADABLE = 121  # the disassembler in Triton 3.6 does not know it
WIDTHS = (128, 640, 896, 1024, 4224, 5120, 6144, 17408)
ROWS = (1, 2, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 300, 8192)


def shapes(width: int, rows: int) -> tuple[RowsShape, ...]:
    return mma_shape(width, rows), wgmma_shape(width, 5120, rows)


def test_token_tiles_cover_the_rows_and_little_more() -> None:
    for rows in ROWS:
        for shape in shapes(5120, rows):
            blocks = num_token_blocks(rows, shape)
            assert (blocks - 1) * shape.token_tile < rows <= blocks * shape.token_tile


def test_what_the_kernels_ask_of_a_shape() -> None:
    for width in WIDTHS:
        longest = max(end - first for first, end in itertools.pairwise(split_borders(width)))
        for rows in ROWS:
            for shape in shapes(width, rows):
                assert shape.warps in (4, 8) and shape.columns * 2 in (128, 256)
                assert shape.token_tile % shape.finish_tokens == 0 and shape.finish_tokens >= 2 * shape.warps
                assert 1 <= shape.helpers <= min(8, shape.token_tile // shape.finish_tokens)
                assert shape.stages == longest // 128 if shape.whole else shape.stages >= 2
                assert shape.stages * shape.token_tile * 256 < 99 * 1024, "shared memory of the smallest cards"


def test_programs_cover_every_block_and_split_once() -> None:
    for shape in (mma_shape(5120, 20), dataclasses.replace(wgmma_shape(5120, 5120, 100), span=16)):
        for out_features in (128, 384, 17408):
            tiles, inside, spans = launch_grid(out_features, 8, 100, shape)
            span = shape.span_of(out_features)
            assert inside == span * 8 and tiles == num_token_blocks(100, shape)
            # As `epilogue.program_place` finds them.
            places = {(outer * span + i % span, i // span) for outer in range(spans) for i in range(inside)}
            assert places == {(block, split) for block in range(out_features // shape.columns) for split in range(8)}


@pytest.mark.parametrize("programs", [1, 132, 320, 640, 1056, 2176])
@pytest.mark.parametrize(("tiles", "tile_bytes"), [(17, 2048), (5, 2048), (4, 8192), (4, 16384)])
def test_no_sm_has_room_for_more_than_its_share(programs: int, tiles: int, tile_bytes: int) -> None:
    shape = evenly(mma_shape(5120, 8), programs, tiles, tile_bytes, HOPPER)
    share = -(-programs // HOPPER.num_sms)
    memory = (tiles + shape.spare) * tile_bytes
    assert memory <= HOPPER.shared_memory
    if shape.spare:
        assert share * (memory + 1024) <= HOPPER.shared_memory < (share + 1) * memory
    elif share <= 8 and tile_bytes == 2048:
        assert (share + 1) * memory > HOPPER.shared_memory


def test_registers_are_capped_where_that_was_measured() -> None:
    shape = mma_shape(640, 8)
    mul1 = pack_group([random_linear(640, 128, 4.0, Codebook.MUL1)], [None])
    assert register_cap(shape, mul1, HOPPER) == shape.registers
    assert register_cap(shape, mixed_group(), HOPPER) is None
    other = dataclasses.replace(HOPPER, capability=(8, 6))
    assert register_cap(shape, mul1, other) is None
    assert mma_register_cap(shape, mul1, HOPPER) == shape.registers
    many = mma_shape(640, 64)
    six = pack_group([random_linear(640, 128, 6.0, Codebook.MUL1)], [None])
    caps = [mma_register_cap(many, group, HOPPER) for group in (mul1, six, mixed_group())]
    assert caps == [many.registers, None, None]
    assert [mma_register_cap(many, group, other) for group in (mul1, mixed_group())] == [None, 168]


def test_scratch_grows_with_rows_and_holds_every_partial_sum() -> None:
    for width in WIDTHS:
        for cut in (mma_shape, lambda width, rows: wgmma_shape(width, 384, rows)):
            sizes = [scratch_for(width, 384, rows, cut(width, rows)) for rows in ROWS]
            for before, after in itertools.pairwise(sizes):
                assert before.counters <= after.counters and before.partials <= after.partials
            for rows, size in zip(ROWS, sizes, strict=True):
                assert size.partials >= num_splits(width) * rows * 384
                assert size.counters == num_token_blocks(rows, cut(width, rows)) * 3


def mixed_group() -> LinearGroup:
    rates = ((256, 4.0, Codebook.MUL1), (128, 4.0, Codebook.MUL1), (128, 3.0, Codebook.MCG))
    return pack_group([random_linear(640, *member) for member in rates], [None, None, torch.ones(128)])


def test_member_ends() -> None:
    assert member_ends(mixed_group()) == (256, 384, 512)


def compiled(
    form: str, capability: int, width: int, rows: int, rate: float = 4.0, codebook: int = 2, **types: str
) -> MachineCode:
    """The kernel for one linear [width, 5120], as its launcher would call it."""
    shape = wgmma_shape(width, 5120, rows) if form == "rows_wgmma" else mma_shape(width, rows)
    constants: dict[str, Any] = {
        "K": width,
        "N": 5120,
        "RUNS": ((0, 5120, int(2 * rate), codebook),),
        "ENDS": (5120,),
        "SPLITS": num_splits(width),
        "SPAN": 16,
        "W": shape.warps,
        "BT": shape.token_tile,
        "STAGES": shape.stages,
        "SPARE": 1,
        "GROUPS": shape.finish_tokens // 8,
        "PDL": capability >= 90,
    }
    pointers = dict(POINTERS)
    if form == "rows_wgmma":
        kernel, constants["HELPERS"] = one_run_wgmma, shape.helpers
        pointers["x"] = f"tensordesc<fp16[{shape.token_tile}, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>"
    else:
        kernel, constants["WHOLE"], pointers["x"] = one_run_mma, shape.whole, "*fp16"
    run = Run(0, 5120, rate, tuple(Codebook)[codebook], torch.empty(0))
    group = LinearGroup(width, (5120,), (run,), torch.empty(0), torch.empty(0), None)
    device = dataclasses.replace(HOPPER, capability=divmod(capability, 10))
    cap = register_cap if form == "rows_wgmma" else mma_register_cap
    options = {"enable_fp_fusion": False, "maxnreg": cap(shape, group, device)}
    types = {**pointers, "T": "i32", "out_stride": "i32", **types}
    return compile_kernel(kernel, types, constants, capability, shape.warps, **options)


if HAS_TRITON:

    @gluon.jit
    def one_run_mma(
        x, words, svh, bias, out, partials, counters, T, out_stride, K: gl.constexpr, N: gl.constexpr, RUNS: gl.constexpr,
        ENDS: gl.constexpr, SPLITS: gl.constexpr, SPAN: gl.constexpr, W: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr,
        WHOLE: gl.constexpr, SPARE: gl.constexpr, GROUPS: gl.constexpr, PDL: gl.constexpr,
    ):  # fmt: skip
        rows_mma.rows_mma(
            x, (words,), svh, bias, out, partials, counters, T, out_stride, K, N, RUNS, ENDS, SPLITS, SPAN, W,
            BT, STAGES, WHOLE, SPARE, GROUPS, PDL
        )  # fmt: skip

    @gluon.jit
    def one_run_wgmma(
        x, words, svh, bias, out, partials, counters, T, out_stride, K: gl.constexpr, N: gl.constexpr, RUNS: gl.constexpr,
        ENDS: gl.constexpr, SPLITS: gl.constexpr, SPAN: gl.constexpr, W: gl.constexpr, BT: gl.constexpr, STAGES: gl.constexpr,
        SPARE: gl.constexpr, GROUPS: gl.constexpr, HELPERS: gl.constexpr, PDL: gl.constexpr,
    ):  # fmt: skip
        rows_wgmma.rows_wgmma(
            x, (words,), svh, bias, out, partials, counters, T, out_stride, K, N, RUNS, ENDS, SPLITS, SPAN, W,
            BT, STAGES, SPARE, GROUPS, HELPERS, PDL
        )  # fmt: skip


@needs_triton
@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_the_portable_form_compiles_for_every_card(capability: int, rows: int) -> None:
    code = compiled("rows_mma", capability, 5120, rows)
    assert code.stack == 0
    if capability == UNREADABLE:
        return
    opcodes = {opcode.split(".")[0] for _, opcode, _ in code.instructions}
    assert "HMMA" in opcodes and "HGMMA" not in opcodes
    # A turn of the loop decodes 128 x 16 weights a warp, 64 a lane; what the tensor core's operands cost comes on top.
    loop = code.longest_loop()
    if rows == 1:
        assert loop.total() < 64 * 5.5
    else:
        assert (loop["HMMA"], loop["LDSM"]) == (64, 32) and loop.total() < 64 * 5.5 + 64 + 32 + 48
    if capability == 90:
        assert code.registers <= 96, "five programs share an SM"


@needs_triton
@pytest.mark.parametrize("rows", [64, 128])
def test_the_hopper_form_compiles(rows: int) -> None:
    code = compiled("rows_wgmma", 90, 5120, rows)
    assert code.stack == 0
    opcodes = [opcode.split(".")[0] for _, opcode, _ in code.instructions]
    assert opcodes.index("ACQBULK") < opcodes.index("REDG") < opcodes.index("HGMMA"), (
        "a program says early that it has begun"
    )
    assert not code.overwritten_operands()


@needs_triton
@pytest.mark.sweep
@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_the_portable_form_at_other_tiles(capability: int, rows: int) -> None:
    assert compiled("rows_mma", capability, 5120, rows).stack == 0


@needs_triton
@pytest.mark.sweep
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("codebook", [0, 1, 2])
def test_no_rate_spills(rate: float, codebook: int) -> None:
    if rate == int(rate) or codebook == 2:
        for rows in (8, 64):
            assert compiled("rows_mma", 86, 5120, rows, rate, codebook).stack == 0
            code = compiled("rows_wgmma", 90, 5120, 64, rate, codebook, out="*bf16")
            assert code.stack == 0 and not code.overwritten_operands()


@needs_triton
@pytest.mark.parametrize(("form", "rows"), [("rows_mma", 8), ("rows_wgmma", 64)])
def test_only_words_are_read_before_the_wait(form: str, rows: int) -> None:
    """Two steps of them, a lane's own and its neighbour's; whoever launched before may still be writing anything else."""
    before = compiled(form, 90, 5120, rows).before_wait()
    loads = [opcode for opcode in before if opcode.startswith(READS)]
    assert len(loads) == 4 and all(opcode.startswith("LDG") and opcode.endswith(".128") for opcode in loads)
    assert not [opcode for opcode in before if opcode.startswith((*WRITES, "EXIT"))]
