"""How launches of the row forms are cut: token tiles, stages of x in shared memory, scratch. Pure functions of shapes; knows no kernel.

None of it shows in a bit of the output, so it may follow measurements: benchmarks/notes/exl3-linear-rows.md.
"""

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any

from espalier.kernels.counters import ScratchSize
from espalier.kernels.device import DeviceClass
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.linear.group import LinearGroup
from espalier.kernels.linear.splits import BORDER, num_splits

HOPPER = (9, 0)
BLOCK = 128  # columns that are rotated together

_SUMS_IN_L2 = 40 << 20  # bytes of partial sums
_EVEN_SHARE = 8  # programs of an SM; with more of them, chance evens out
_PROGRAM_BYTES = 1024  # of shared memory that the system takes for each program


@dataclass(frozen=True, slots=True)
class RowsShape:
    """How a launch is cut.

    token_tile: rows of a program. stages: of x in shared memory, 128 inputs each; whole: they hold a split's x at once, else they are a
    ring. finish_tokens: rows of a block that a program finishes together, 2 * warps at least. warps: of a program, 4 or 8, with 16 columns
    each. helpers: programs of `rows_wgmma` that share the finishing of a block, 8 at most. registers: most that a thread may take, where
    fewer than the compiler likes let more programs share an SM. span: blocks of columns whose splits run together; all of them when None.
    spare: tiles of shared memory taken beyond the need.
    """

    token_tile: int
    stages: int
    whole: bool
    finish_tokens: int
    warps: int = 4
    helpers: int = 1
    registers: int | None = None
    span: int | None = None
    spare: int = 0

    @property
    def columns(self) -> int:
        """Of a program."""
        return 16 * self.warps

    def span_of(self, out_features: int) -> int:
        """`span`, or as much of it as divides the blocks of columns."""
        blocks = out_features // self.columns
        return blocks if self.span is None else math.gcd(self.span, blocks)


def mma_shape(in_features: int, rows: int) -> RowsShape:
    """Of `rows_mma`."""
    tile = next((tile for tile in (8, 16, 32) if rows <= tile), 64)
    blocks = -(-in_features // (BORDER * num_splits(in_features)))  # of the longest split
    if blocks <= {8: 20, 16: 5, 32: 5, 64: 0}[tile]:
        return RowsShape(tile, blocks, True, min(tile, 16), registers={8: 56, 16: 64, 32: 80}[tile])
    return RowsShape(tile, 4 if tile == 32 else 2, False, min(tile, 16), registers={32: 80, 64: 96}.get(tile))


def wgmma_shape(in_features: int, out_features: int, rows: int) -> RowsShape:
    """Of `rows_wgmma`."""
    # Two tiles of 64 rows find their second copy of the words in L2; long splits of few columns gain more by decoding them once.
    most = 128 if in_features >= 2 * out_features else 64
    tile = next((tile for tile in (32, 64) if rows <= tile), most)
    finish = 8 if tile == 32 else 16
    shape = RowsShape(tile, 2, False, finish, helpers=tile // finish, registers={32: 80, 64: 96}.get(tile))
    return in_spans(shape, in_features, out_features, rows)


def in_spans(shape: RowsShape, in_features: int, out_features: int, rows: int) -> RowsShape:
    """`shape`, in spans of columns where the partial sums of all columns do not fit the L2."""
    sums = rows * out_features * num_splits(in_features) * 4
    return dataclasses.replace(shape, span=16) if sums > _SUMS_IN_L2 else shape


def register_cap(shape: RowsShape, group: LinearGroup, device: DeviceClass) -> int | None:
    """Measured on Hopper with mul1. Other codebooks, and 8 bits, need a few registers more and would spill; other cards were not measured."""
    fits = all(run.codebook is Codebook.MUL1 and run.rate < 8 for run in group.runs)
    return shape.registers if device.capability == HOPPER and fits else None


def mma_register_cap(shape: RowsShape, group: LinearGroup, device: DeviceClass) -> int | None:
    """`register_cap` of `rows_mma`, whose tile of 64 rows has none to spare."""
    if shape.token_tile == 64:
        if device.capability != HOPPER:
            # Left alone, the compiler comes down to 96 registers, and may spill for it.
            return None if all(run.codebook is Codebook.MUL1 for run in group.runs) else 168
        if any(run.rate > 4 for run in group.runs):
            return None
    return register_cap(shape, group, device)


def evenly(shape: RowsShape, programs: int, tiles: int, tile_bytes: int, device: DeviceClass) -> RowsShape:
    """`shape` with so much spare shared memory that no SM takes more programs than its share.

    Dependent launches begin while the programs before them still run. Without this, the first SMs to have room would take too many of a
    launch that fits the device at once, and the others too few. tiles, tile_bytes: what a program needs.
    """
    share = -(-programs // max(device.num_sms, 1))
    if share > _EVEN_SHARE:
        return shape
    spare = max(0, device.shared_memory // (share + 1) // tile_bytes + 1 - tiles)
    fits = share * ((tiles + spare) * tile_bytes + _PROGRAM_BYTES) <= device.shared_memory
    return dataclasses.replace(shape, spare=spare) if fits else shape


def num_token_blocks(rows: int, shape: RowsShape) -> int:
    """Token tiles that cover the rows."""
    return -(-rows // shape.token_tile)


def launch_grid(out_features: int, splits: int, rows: int, shape: RowsShape) -> tuple[int, int, int]:
    """Token tiles, splits of a span of columns, spans."""
    span = shape.span_of(out_features)
    return num_token_blocks(rows, shape), span * splits, out_features // shape.columns // span


def scratch_for(in_features: int, out_features: int, rows: int, shape: RowsShape) -> ScratchSize:
    """A counter for each token tile and block of 128 columns; all partial sums of whole token tiles."""
    tiles = num_token_blocks(rows, shape)
    return ScratchSize(
        counters=tiles * (out_features // BLOCK),
        partials=tiles * shape.token_tile * out_features * num_splits(in_features),
    )


def run_constants(group: LinearGroup) -> tuple[tuple[int, int, int, int], ...]:
    """(first column, end, 2 * rate, codebook's number) of each run. They cover all columns: a program of none would never begin."""
    ends = [0, *(run.first_column + run.columns for run in group.runs)]
    assert ends == [*(run.first_column for run in group.runs), group.out_features]
    return tuple(
        (run.first_column, run.first_column + run.columns, int(2 * run.rate), run.codebook.number) for run in group.runs
    )


def kernel_constants(group: LinearGroup, shape: RowsShape) -> dict[str, Any]:
    """The compile-time arguments that the row kernels have in common."""
    return {
        "K": group.in_features,
        "N": group.out_features,
        "RUNS": run_constants(group),
        "ENDS": member_ends(group),
        "SPLITS": num_splits(group.in_features),
        "SPAN": shape.span_of(group.out_features),
        "W": shape.warps,
        "BT": shape.token_tile,
        "STAGES": shape.stages,
        "SPARE": shape.spare,
        "GROUPS": shape.finish_tokens // 8,
    }


def member_ends(group: LinearGroup) -> tuple[int, ...]:
    """First output column beyond each member."""
    return tuple(itertools.accumulate(group.widths))
