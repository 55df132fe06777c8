"""Who does what in a round that mixes prompts and decode rows: lists that the host makes once a round and every layer reads. Pure; knows no kernel.

Programs for all that each lane might have would be many times those that the round's rows can fill, and such a program costs nanoseconds.
The lists are a matter of time alone: no row's bits depend on their order or on who does what.
"""

import numpy as np
import numpy.typing as npt

from espalier.kernels.attention.splits import SPLIT_KEYS

Words = npt.NDArray[np.int32]

TILE_ROWS = 128  # of one key-value head: a token's query heads that share it side by side, then the next token's


def most_tiles(num_rows: int, num_lanes: int, group: int, few_rows: int) -> int:
    """Entries of `prompt_tiles` at most, for lanes that have num_rows rows together."""
    prompts = min(num_lanes, num_rows // (few_rows + 1))
    return (num_rows * group + prompts * (TILE_ROWS - 1)) // TILE_ROWS


def prompt_tiles(num_rows: Words, start: Words, group: int, few_rows: int) -> Words:
    """(lane, tile of its rows) of all tiles of the lanes that have more than few_rows rows: int32 [tiles, 2].

    num_rows, start: [lanes], as in `LaneTable`. group: query heads that share a key-value head. Tiles that see most keys come first, so that
    what runs last is short.
    """
    lane, tile = _each(np.where(num_rows > few_rows, -(-num_rows * group // TILE_ROWS), 0))
    seen = start[lane] + np.minimum(((tile + 1) * TILE_ROWS - 1) // group + 1, num_rows[lane])
    order = np.argsort(-seen, kind="stable")
    return np.stack((lane[order], tile[order]), axis=1).astype(np.int32)


def decode_shares(num_rows: Words, start: Words, few_rows: int) -> Words:
    """(lane, share, shares of the lane) of the lanes that have 1 to few_rows rows: int32 [lanes, 3], zeros where there is no such lane.

    There are as many entries as lanes: those that lanes of other sizes leave over go to the ones with most splits of keys.
    """
    shares = np.zeros((len(num_rows), 3), dtype=np.int32)
    few = np.flatnonzero((num_rows > 0) & (num_rows <= few_rows))
    if len(few):
        splits = -(-(start[few] + num_rows[few]) // SPLIT_KEYS)
        counts = 1 + splits * (len(num_rows) - len(few)) // splits.sum()
        counts[: len(num_rows) - counts.sum()] += 1
        which, share = _each(counts)
        shares[:] = np.stack((few[which], share, counts[which]), axis=1)
    return shares


def _each(counts: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of counts[i] things of each kind i, one after the other: the kind, and how many of it come before."""
    kind = np.repeat(np.arange(len(counts)), counts)
    return kind, np.arange(len(kind)) - np.repeat(np.cumsum(counts) - counts, counts)
