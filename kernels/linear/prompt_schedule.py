"""Which program computes what of a prompt product: whole tiles round robin, tiles that fill no round dealt out split by split.

A tile is 128 output columns x some tokens. `deal` decides; the kernel's `segments` and `segment` (prompt_wgmma_work.py) carry it out, and
`segments_of` says in plain Python what they do, for tests. A schedule shows in no bit of the output: the sums of a tile that several
programs share are kept apart and added left to right. Prices: benchmarks/notes/exl3-linear-prompts.md.
"""

from dataclasses import dataclass

MAX_PROGRAMS = 132  # that share tiles, at most: bounds the scratch


@dataclass(frozen=True, slots=True)
class Deal:
    """whole: tiles 0..whole-1 are done whole, by program tile % programs. dealers: programs that share the splits of the rest."""

    programs: int
    whole: int
    dealers: int


@dataclass(frozen=True, slots=True)
class Segment:
    """What a program does in one go: splits first..last-1 of a tile."""

    tile: int
    first: int
    last: int


def deal(tiles: int, splits: int, programs: int) -> Deal:
    """The schedule of `tiles` tiles on up to `programs` programs that run side by side. Every one of them has something to do."""
    rest = tiles % programs
    # Whole tiles that leave next to nothing idle need no second pass over sums.
    if splits == 1 or 8 * rest >= 7 * programs:
        return Deal(min(programs, tiles), tiles, 0)
    dealers = min(programs, rest * splits)
    return Deal(programs if tiles > rest else dealers, tiles - rest, dealers)


def segments_of(program: int, tiles: int, splits: int, schedule: Deal) -> list[Segment]:
    """What `program` does, in order."""
    found = [Segment(tile, 0, splits) for tile in range(program, schedule.whole, schedule.programs)]
    if program < schedule.dealers:
        units = (tiles - schedule.whole) * splits
        unit, end = program * units // schedule.dealers, (program + 1) * units // schedule.dealers
        while unit < end:
            stop = min(end, unit // splits * splits + splits)
            found.append(Segment(schedule.whole + unit // splits, unit % splits, stop - unit // splits * splits))
            unit = stop
    return found


def owner(unit: int, units: int, dealers: int) -> int:
    """The program that a shared split, counted over all shared tiles, is dealt to."""
    return ((unit + 1) * dealers - 1) // units


def choose_tokens(rows: int, column_blocks: int, in_features: int, programs: int) -> int:
    """Tokens of a tile: 256, which share each decoded weight among more rows, or 128 where those are fewer.

    Also where narrow tiles fill the programs and wide ones do not, if a tile is short: the second pass over shared sums weighs more then.
    """
    if rows <= 128:
        return 128
    wide_tiles, narrow_tiles = (-(-rows // tokens) * column_blocks for tokens in (256, 128))
    return 128 if rows > 256 and wide_tiles < programs <= narrow_tiles and in_features <= 8192 else 256


def member_ends(widths: tuple[int, ...], first_column: int) -> tuple[int, ...]:
    """End of each of a group's members in blocks of 128 columns from `first_column` on; of members before it, 0 or less."""
    ends, end = [], -first_column
    for width in widths:
        end += width
        ends.append(end // 128)
    return tuple(ends)
