"""Lists of who does what in a mixed round: each tile of a prompt once, each split of a decode row once, within the room that there is."""

import random

import numpy as np
import pytest

from espalier.kernels.attention.splits import SPLIT_KEYS
from espalier.kernels.attention.work import TILE_ROWS, Words, decode_shares, most_tiles, prompt_tiles


def words(*numbers: int) -> Words:
    return np.array(numbers, dtype=np.int32)


def test_tiles_that_see_most_keys_come_first() -> None:
    # 32 rows a tile. Lane 0 is a decode row, lane 2 has none, lane 3's rows end within its second tile.
    tiles = prompt_tiles(words(1, 96, 0, 40), words(5000, 0, 7000, 50), group=4, few_rows=1)
    assert tiles.dtype == np.int32
    # Their last rows see 96, 90, 82, 64, 32 keys.
    assert tiles.tolist() == [[1, 2], [3, 1], [3, 0], [1, 1], [1, 0]]


@pytest.mark.parametrize(("rows", "tiles"), [(16, 0), (17, 1), (18, 1), (19, 2), (36, 2), (37, 3)])
def test_tiles_of_heads_that_do_not_divide_them(rows: int, tiles: int) -> None:
    """Seven heads: the 19th token begins a second tile, in its middle."""
    found = prompt_tiles(words(rows), words(0), group=7, few_rows=16)
    assert sorted(found[:, 1]) == list(range(tiles))


def test_nothing_to_list() -> None:
    assert prompt_tiles(words(1, 0, 16), words(9, 9, 9), group=4, few_rows=16).shape == (0, 2)
    assert decode_shares(words(17, 0), words(9, 9), few_rows=16).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_a_long_lane_has_more_shares() -> None:
    # 64 splits, 3 and 1; five entries are left over.
    shares = decode_shares(words(1, 2048, 1, 0, 1, 0, 0, 0), words(16383, 0, 700, 0, 5, 0, 0, 0), few_rows=1)
    assert shares.dtype == np.int32
    assert shares[:, 0].tolist() == [0, 0, 0, 0, 0, 0, 2, 4]
    assert shares[:6, 1].tolist() == list(range(6)) and set(shares[:6, 2]) == {6}
    assert shares[6:, 1:].tolist() == [[0, 1], [0, 1]]


def random_lanes(draw: random.Random) -> tuple[Words, Words]:
    count = draw.randrange(1, 20)
    num_rows = words(*(draw.choice((0, 1, 1, 2, 16, 17, 31, 32, 33, draw.randrange(300))) for _ in range(count)))
    start = words(*(draw.choice((0, 255, 256, draw.randrange(40_000))) for _ in range(count)))
    return num_rows, start


@pytest.mark.parametrize("few_rows", [1, 16])
def test_everything_is_done_once(few_rows: int) -> None:
    draw = random.Random(few_rows)
    for _ in range(300):
        num_rows, start = random_lanes(draw)
        group = draw.choice((1, 2, 4, 5, 7, 16))
        tiles = prompt_tiles(num_rows, start, group, few_rows)
        wanted = [
            (lane, tile)
            for lane, rows in enumerate(num_rows.tolist())
            if rows > few_rows
            for tile in range(-(-rows * group // TILE_ROWS))
        ]
        assert sorted(map(tuple, tiles.tolist())) == wanted
        room = most_tiles(int(num_rows.sum()) + draw.randrange(50), len(num_rows), group, few_rows)
        assert len(tiles) <= room

        shares = decode_shares(num_rows, start, few_rows)
        assert shares.shape == (len(num_rows), 3)
        programs = draw.choice((1, 3, 4))
        done: list[tuple[int, int]] = []
        for lane, share, count in shares.tolist():
            if 0 < num_rows[lane] <= few_rows:
                splits = -(-int(start[lane] + num_rows[lane]) // SPLIT_KEYS)
                for program in range(programs):
                    first, step = share * programs + program, count * programs
                    done += [(lane, split) for split in range(first, splits, step)]
        wanted = [
            (lane, split)
            for lane, rows in enumerate(num_rows.tolist())
            if 0 < rows <= few_rows
            for split in range(-(-int(start[lane] + rows) // SPLIT_KEYS))
        ]
        assert sorted(done) == wanted


def test_there_is_no_more_room_than_tiles_can_need() -> None:
    """Two heads, 64 rows a tile: 100 rows of at most three prompts, each of which may end just behind a tile."""
    found = max(
        len(prompt_tiles(words(a, b, 100 - a - b), words(0, 0, 0), group=2, few_rows=1))
        for a in range(2, 97)
        for b in range(2, 99 - a)
    )
    assert found <= most_tiles(100, 3, 2, 1) <= found + 1
