"""Schedules of the prompt forms of the EXL3 linear: every sum is computed once, whoever computes it, and the kernels follow them."""

import types
from collections import Counter

import pytest

from espalier.kernels.linear.prompt_schedule import (
    Deal,
    Segment,
    choose_tokens,
    deal,
    member_ends,
    owner,
    segments_of,
)
from espalier.kernels.linear.splits import split_borders
from tests.support.sass import needs_triton

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

    names: dict[str, object] = {"gl": language, "_GROUP": work._GROUP.value}
    names["tile_place"] = types.FunctionType(work.tile_place.fn.__code__, names)
    return types.FunctionType(function.fn.__code__, names)  # type: ignore[attr-defined]


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
    from espalier.kernels.linear.prompt_wgmma_work import tile_place

    place = python(tile_place, PythonLanguage(0, 1))
    for token_blocks in (1, 11, 43):
        for blocks in (1, 15, 16, 17, 40):
            places = {place(tile, token_blocks, blocks) for tile in range(token_blocks * blocks)}
            assert places == {(column, token) for column in range(blocks) for token in range(token_blocks)}


def test_member_ends_are_counted_from_the_run() -> None:
    assert member_ends((256, 128, 384), 0) == (2, 3, 6)
    assert member_ends((256, 128, 384), 256) == (0, 1, 4)
