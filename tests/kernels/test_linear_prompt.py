"""Prompt forms of the EXL3 linear on the CPU: every sum is computed once, the kernels compile without spills for every card they are for."""

import functools
import types
from collections import Counter
from typing import Any

import pytest
import torch

from espalier.kernels.counters import Scratch
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.linear.group import LinearGroup, Run
from espalier.kernels.linear.prompt_schedule import (
    ROUND_COSTS,
    SPAN_COST,
    Deal,
    Segment,
    choose_spans,
    choose_tokens,
    deal,
    member_ends,
    owner,
    segments_of,
)
from espalier.kernels.linear.splits import split_borders
from tests.support.sass import compile_kernel, needs_triton

SCHEDULES = [
    (rows, blocks, splits, programs)
    for rows in (1, 127, 129, 256, 1000, 8192)
    for blocks in (1, 7, 40, 136)
    for splits in (1, 3, 8)
    for programs in (1, 13, 132)
]


def tiles_of(rows: int, blocks: int) -> int:
    return -(-rows // 256) * blocks


def test_every_split_of_every_tile_is_done_once() -> None:
    for rows, blocks, splits, programs in SCHEDULES:
        tiles = tiles_of(rows, blocks)
        schedule = deal(tiles, splits, programs)
        assert schedule.programs <= programs
        assert all(segments_of(program, tiles, splits, schedule) for program in range(schedule.programs))
        done = Counter(
            (segment.tile, split)
            for program in range(schedule.programs)
            for segment in segments_of(program, tiles, splits, schedule)
            for split in range(segment.first, segment.last)
        )
        assert done == Counter((tile, split) for tile in range(tiles) for split in range(splits))


def test_a_shared_split_is_found_where_its_owner_left_it() -> None:
    for rows, blocks, splits, programs in SCHEDULES:
        tiles = tiles_of(rows, blocks)
        schedule = deal(tiles, splits, programs)
        units = (tiles - schedule.whole) * splits
        for program in range(schedule.dealers):
            shared = [s for s in segments_of(program, tiles, splits, schedule) if s.tile >= schedule.whole]
            assert shared, "a dealer without a split would be waited for in vain"
            for segment in shared:
                first_unit = (segment.tile - schedule.whole) * splits
                assert {
                    owner(first_unit + split, units, schedule.dealers) for split in range(segment.first, segment.last)
                } == {program}


def test_a_program_keeps_no_two_sums_in_one_place() -> None:
    # A program's slots are numbered by split; the head of a tile takes slot 0 for the sum of all its splits.
    for rows, blocks, splits, programs in SCHEDULES:
        tiles = tiles_of(rows, blocks)
        schedule = deal(tiles, splits, programs)
        for program in range(schedule.dealers):
            slots = [
                slot
                for s in segments_of(program, tiles, splits, schedule)
                if s.last - s.first < splits
                for slot in ([0] if s.first == 0 else range(s.first, s.last))
            ]
            assert len(slots) == len(set(slots))


class PythonLanguage(types.SimpleNamespace):
    """As much of Gluon's language as schedules are written in, on plain integers."""

    def __init__(self, program: int, programs: int) -> None:
        super().__init__(
            program_id=lambda axis: program,
            num_programs=lambda axis: programs,
            cdiv=lambda a, b: -(-a // b),
            minimum=min,
            maximum=max,
        )


def python(function: object, language: PythonLanguage) -> types.FunctionType:
    from espalier.kernels.linear import prompt_wgmma_work as work

    code = function.fn.__code__  # type: ignore[attr-defined]
    return types.FunctionType(code, {"gl": language, "GROUP": work.GROUP.value})


@needs_triton
@pytest.mark.parametrize("tokens", [128, 256])
def test_the_kernel_follows_the_schedule(tokens: int) -> None:
    from espalier.kernels.linear import prompt_wgmma_work as work

    for rows, blocks, splits, programs in SCHEDULES:
        tiles = -(-rows // tokens) * blocks
        schedule = deal(tiles, splits, programs)
        where = set()
        for program in {0, 1, schedule.programs // 2, schedule.programs - 1} & set(range(schedule.programs)):
            language = PythonLanguage(program, schedule.programs)
            shape = (rows, schedule.whole, schedule.dealers, blocks, tokens, splits)
            expected = segments_of(program, tiles, splits, schedule)
            assert python(work.segments, language)(*shape) == len(expected)
            for i, segment in enumerate(expected):
                column_block, token_block, first, last, shared, units = python(work.segment, language)(i, *shape)
                assert 0 <= column_block < blocks and 0 <= token_block * tokens < rows
                assert (first, last) == (segment.first, segment.last)
                if segment.tile >= schedule.whole:
                    assert (shared, units) == (segment.tile - schedule.whole, (tiles - schedule.whole) * splits)
                where.add((column_block, token_block, segment.tile))
        assert len({place[:2] for place in where}) == len({place[2] for place in where})


@needs_triton
def test_splits_begin_where_the_rule_says() -> None:
    from espalier.kernels.linear import prompt_wgmma_work as work

    for in_features in (128, 640, 4096, 5120, 17408, 128 * 37):
        borders = split_borders(in_features)
        splits, blocks = len(borders) - 1, in_features // 128
        first_step = types.FunctionType(work.first_step.fn.__code__, {})  # of 64 inputs each
        assert [64 * first_step(split, blocks, splits) for split in range(splits + 1)] == list(borders)


def test_whole_tiles_when_they_leave_little_idle() -> None:
    assert deal(264, 8, 132) == Deal(132, 264, 0)
    assert deal(130, 8, 132) == Deal(130, 130, 0)
    assert deal(136, 8, 132) == Deal(132, 132, 32)
    assert segments_of(0, 136, 8, deal(136, 8, 132)) == [Segment(0, 0, 8), Segment(132, 0, 1)]


def test_tile_width() -> None:
    assert [choose_tokens(rows, 136, 5120, 132) for rows in (1, 128, 129, 512, 8192)] == [128, 128, 256, 256, 256]
    assert [choose_tokens(rows, 40, 6144, 132) for rows in (128, 256, 512, 1024)] == [128, 256, 128, 256]
    assert choose_tokens(512, 40, 17408, 132) == 256


@needs_triton
def test_every_whole_tile_has_a_place_of_its_own() -> None:
    from espalier.kernels.linear.prompt_decoded_multiply import place_of

    place = python(place_of, PythonLanguage(0, 1))
    for token_blocks in (1, 11, 43):
        for blocks in (1, 15, 16, 17, 40):
            places = {place(tile, token_blocks, blocks) for tile in range(token_blocks * blocks)}
            assert places == {(column, token) for column in range(blocks) for token in range(token_blocks)}


def rounds_cost(blocks: int, tokens: int, rows: int, programs: int) -> int:
    return -(-blocks * -(-rows // tokens) // programs) * ROUND_COSTS[tokens]


@pytest.mark.parametrize(("rows", "programs"), [(1, 132), (300, 5), (1536, 132), (2048, 132), (8192, 132), (8192, 20)])
@pytest.mark.parametrize(("blocks", "most"), [(1, 51), (7, 1), (40, 15), (40, 42), (136, 51)])
def test_spans_are_the_cheapest_that_cover_the_columns(blocks: int, most: int, rows: int, programs: int) -> None:
    @functools.cache
    def least(left: int) -> int:
        lengths = range(1, min(most, left) + 1)
        costs = [
            least(left - length) + rounds_cost(length, tokens, rows, programs) + SPAN_COST
            for length in lengths
            for tokens in ROUND_COSTS
        ]
        return min(costs, default=0)

    spans = choose_spans(blocks, rows, most, programs)
    assert sum(length for length, _ in spans) == blocks and all(1 <= length <= most for length, _ in spans)
    assert [tokens for _, tokens in spans] == sorted((tokens for _, tokens in spans), reverse=True)
    assert sum(rounds_cost(*span, rows, programs) + SPAN_COST for span in spans) == least(blocks)


def test_narrower_tiles_instead_of_a_round_that_most_programs_miss() -> None:
    # Four shapes of a 27B model (column blocks, most of them in a span) -> percent of the programs' time that is idle.
    shapes = {"A": (136, 51), "B": (40, 15), "C": (40, 42), "D": (96, 51)}
    assert choose_spans(40, 2048, 42, 132) == ((24, 192), (16, 128))  # 440 wide tiles would be 3.3 rounds
    assert choose_spans(40, 2048, 15, 132) == ((12, 192), (12, 192), (8, 128), (8, 128))
    assert choose_spans(136, 2048, 51, 132) == ((48, 192), (48, 192), (24, 192), (16, 128))
    assert choose_spans(96, 2048, 51, 132) == ((48, 192), (48, 192))  # eight rounds
    idle = {}
    for name, (blocks, most) in shapes.items():
        for rows in (1536, 2048, 4096, 8192):
            taken = sum(rounds_cost(*span, rows, 132) for span in choose_spans(blocks, rows, most, 132))
            idle[name, rows] = round(100 - 100 * 100 * rows / 192 * blocks / 132 / taken)
    assert {name: [idle[name, rows] for rows in (1536, 2048, 4096, 8192)] for name in shapes} == {
        "A": [2, 4, 3, 2],
        "B": [11, 5, 4, 4],
        "C": [11, 5, 4, 4],
        "D": [3, 3, 3, 1],
    }


@needs_triton
def test_spans_cover_the_columns_and_fit_the_scratch() -> None:
    from espalier.kernels.linear import prompt_decoded

    runs = tuple(
        Run(first, columns, 4.0, Codebook.MUL1, torch.empty(0)) for first, columns in ((0, 17408), (17408, 128))
    )
    nothing = torch.empty(0)
    for in_features in (640, 5120, 17408, 1 << 20):
        group = LinearGroup(in_features, (17408, 128), runs, nothing, nothing, None)
        size = prompt_decoded.scratch_size(in_features, group.widths, 2048)
        for rows in (1, 2048, 8192):
            found = prompt_decoded.spans(group, rows, 132)
            columns = [
                span.run.first_column // 128 + block
                for span in found
                for block in range(span.first_block, span.first_block + span.blocks)
            ]
            assert columns == list(range(137))
            assert all(2 * size.partials >= span.blocks * 128 * in_features for span in found)


class Recorder:
    """In a kernel's place: what it is launched with, by name."""

    def __init__(self, kernel: Any, launches: list[dict[str, Any]]) -> None:
        self.names, self.launches = kernel.arg_names, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launches.append(
            {"grid": grid} | dict(zip(self.names, args, strict=False)) | options
        )


@needs_triton
def test_a_span_is_decoded_and_then_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    from espalier.kernels.linear import decode_weights, prompt_decoded

    launches: list[dict[str, Any]] = []
    for module, name in ((decode_weights, "decode_weights"), (prompt_decoded, "prompt_decoded")):
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), launches))
    monkeypatch.setattr(prompt_decoded, "SPAN_WEIGHTS", 6 * 640 * 128)
    words, bias = [torch.zeros(1, dtype=torch.int32) for _ in range(2)], torch.zeros(1792)
    runs = (Run(0, 1280, 4.0, Codebook.MUL1, words[0]), Run(1280, 512, 3.5, Codebook.MCG, words[1]))
    group = LinearGroup(640, (1280, 512), runs, torch.zeros(2, 640), torch.zeros(1792).half(), bias)
    scratch = Scratch(
        torch.zeros(0, dtype=torch.int32), torch.zeros(prompt_decoded.scratch_size(640, group.widths, 2048).partials)
    )
    out = torch.zeros(2048, 1792)
    for span in prompt_decoded.spans(group, 2048, 20):
        prompt_decoded.launch_span(torch.zeros(2, 2048, 640).half(), group, span, out, scratch, 20)
    multiplied: list[int] = []
    for decoded, product in zip(launches[::2], launches[1::2], strict=True):
        first, blocks = product["first_block"], product["NB"]
        run = runs[0] if first < 10 else runs[1]
        assert decoded["words"] is run.words
        assert (run.first_column // 128 + decoded["first_block"], decoded["blocks"]) == (first, blocks)
        assert (decoded["RATE2"], decoded["CODEBOOK"]) == (2 * run.rate, run.codebook.number)
        weights = decoded["weights"]
        assert weights.shape == (10 * 128 * blocks, 64) and weights.data_ptr() == scratch.partials.data_ptr()
        assert product["weights"].base is weights and product["x"].base.shape == (2 * 2048, 640)
        for name, whole in (("svh", group.svh), ("bias", bias), ("out", out.t())):
            assert product[name].data_ptr() == whole[128 * first :].data_ptr()
        tiles = -(-2048 // product["tokens"]) * blocks
        assert (product["T"], product["blocks"], product["grid"]) == (2048, 5, (min(tiles, 20),))
        multiplied += range(first, first + blocks)
    assert multiplied == list(range(14))


def test_member_ends_are_counted_from_the_run() -> None:
    assert member_ends((256, 128, 384), 0) == (2, 3, 6)
    assert member_ends((256, 128, 384), 256) == (0, 1, 4)


@needs_triton
@pytest.mark.parametrize(
    ("tokens", "rate2"),
    [
        (128, 7),
        (256, 12),
        *(pytest.param(256, rate2, marks=pytest.mark.sweep) for rate2 in (2, 3, 4, 5, 6, 7, 8, 10, 14, 16)),
    ],
)
def test_hopper_form_overlaps_and_does_not_spill(tokens: int, rate2: int) -> None:
    from triton.experimental.gluon import language as gl

    from espalier.kernels.linear import prompt_wgmma

    box = f"tensordesc<fp16[{tokens}, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>"
    pointers = {
        "words": "*i32",
        "svh": "*fp16",
        "bias": "*fp32",
        "out": "*fp16",
        "partials": "*fp32",
        "counters": "*i32",
    }
    constants = {
        "ENDS": (8, 16),
        "NB": 16,
        "BT": tokens,
        "STAGES": prompt_wgmma.STAGES[tokens],
        "SPLITS": 8,
        "RATE2": rate2,
    }
    code = compile_kernel(
        prompt_wgmma.prompt_wgmma,
        {"x": box} | pointers | dict.fromkeys(("T", "out_stride", "blocks", "whole", "dealers"), "i32"),
        constants | {"CODEBOOK": 2},
        capability=90,
        num_warps=prompt_wgmma.NUM_WARPS,
        enable_fp_fusion=False,
    )
    assert code.stack == 0
    opcodes = [opcode for _, opcode, _ in code.instructions]
    products = sum(opcode.startswith("HGMMA") for opcode in opcodes)
    # Where the assembler cannot prove accumulators safe it waits for every single product, and nothing overlaps.
    assert 0 < opcodes.count("WARPGROUP.DEPBAR.LE") <= products // 2
    assert not code.overwritten_operands()


@needs_triton
@pytest.mark.parametrize("out", ["*fp16", "*fp32"])
def test_form_on_decoded_weights_overlaps_and_does_not_spill(out: str) -> None:
    from triton.experimental.gluon import language as gl

    from espalier.kernels.linear import prompt_decoded

    layout = gl.NVMMASharedLayout(128, 16, 2)
    boxes = {name: f"tensordesc<fp16[{rows}, 64],{layout!r}>" for name, rows in (("x", 64), ("weights", 128))}
    pointers = {"svh": "*fp16", "bias": "*fp32", "out": out}
    integers = ("T", "tokens", "out_stride", "blocks", "first_block", "NB")
    code = compile_kernel(
        prompt_decoded.prompt_decoded,
        boxes | pointers | dict.fromkeys(integers, "i32"),
        {"ENDS": (8, 16), "STAGES": prompt_decoded.STAGES, "SPLITS": 8},
        capability=90,
        num_warps=prompt_decoded.NUM_WARPS,
        enable_fp_fusion=False,
    )
    assert code.stack == 0
    opcodes = [opcode for _, opcode, _ in code.instructions]
    # Three consumers, each with four products in its loop; a wait in the loop and one behind it.
    assert sum(opcode.startswith("HGMMA") for opcode in opcodes) == 12
    assert opcodes.count("WARPGROUP.DEPBAR.LE") == 6
    assert not code.overwritten_operands()


@needs_triton
@pytest.mark.parametrize(
    "rate2", [8, *(pytest.param(rate2, marks=pytest.mark.sweep) for rate2 in (2, 3, 4, 5, 6, 7, 10, 12, 14, 16))]
)
def test_decoding_does_not_spill_and_stores_wide(rate2: int) -> None:
    from espalier.kernels.linear import decode_weights

    code = compile_kernel(
        decode_weights.decode_weights,
        {"words": "*i32", "weights": "*fp16", "first_block": "i32", "blocks": "i32"},
        {"ROW": 5120 * rate2, "STEPS": 2, "RATE2": rate2, "CODEBOOK": 2},
        capability=90,
        num_warps=decode_weights.NUM_WARPS,
    )
    assert code.stack == 0
    stores = [opcode for _, opcode, _ in code.instructions if opcode.startswith("STG")]
    assert stores and all(opcode == "STG.E.128" for opcode in stores)


@needs_triton
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120, 121])
def test_portable_form_does_not_spill(capability: int) -> None:
    from espalier.kernels.linear import prompt_mma

    limit = {80: 166912, 90: 232448}.get(capability, 101376)
    shape = prompt_mma.choose_shape(limit)
    assert 2 * (shape.shared_memory + 1024) <= limit + 1024, "two programs must fit an SM"
    code = compile_kernel(
        prompt_mma.prompt_mma,
        {
            "x": "*fp16",
            "words": "*i32",
            "svh": "*fp16",
            "bias": "*fp32",
            "out": "*fp16",
            "T": "i32",
            "out_stride": "i32",
            "blocks": "i32",
        },
        {"ENDS": (8, 16), "NB": 16, "BT": shape.tokens, "STAGES": shape.stages, "SPLITS": 8, "RATE2": 6, "CODEBOOK": 2},
        capability=capability,
        num_warps=prompt_mma.NUM_WARPS,
        enable_fp_fusion=False,
    )
    assert code.stack == 0
