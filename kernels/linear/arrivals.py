"""Which programs finish a block of columns, and when its sums are complete. Gluon device functions over one counter word a block.

Alone, the last program to arrive would finish the block while its neighbours leave their SMs empty. With HELPERS over 1, the last that many
to arrive finish it together: those that come before the last one wait for it. A program waits only for programs that have begun, so it
never keeps the place that another needs to begin: who arrives before all have begun declines, and leaves as the others do.

The word, zero before and after a launch: bits 0 to 7 programs that arrived, 8 to 11 how many of those that may help have answered whether
they do, 12 to 15 how many do, 16 to 23 programs that began, 24 to 31 how many are done with their part. Benchmarks: notes/exl3-linear-rows.md.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def begin(counter, HELPERS: gl.constexpr):
    """Once a program, before it works and after the launches before this one are done. Nobody waits for the answer."""
    if HELPERS > 1:
        gl.atomic_add(counter, 1 << 16, sem="relaxed")


@gluon.jit
def arrive(counter, PROGRAMS: gl.constexpr, HELPERS: gl.constexpr):
    """(this program's index among those that finish the block, how many they are), once all sums are visible; (-1, 0) for the others.

    PROGRAMS: that share the word, at most 128; HELPERS: at most 8. The program must have begun (`begin`), its own sums must be stored, and its
    threads past a barrier.
    """
    gl.static_assert(PROGRAMS <= 128)
    gl.static_assert(HELPERS <= 8)
    MOST: gl.constexpr = HELPERS if HELPERS < PROGRAMS else PROGRAMS
    word = gl.atomic_add(counter, 1, sem="acq_rel") + 1
    rank = word & 0xFF
    index = -1
    count = 0
    if MOST == 1:
        if rank == PROGRAMS:
            index = 0
            count = 1
    elif (rank > PROGRAMS - MOST) & (rank <= PROGRAMS):
        all_begun = (word >> 16) & 0xFF == PROGRAMS
        if rank < PROGRAMS:
            gl.atomic_add(counter, gl.where(all_begun, 0x1100, 0x100), sem="relaxed")
        if all_begun:
            while (word & 0xFFF) != PROGRAMS + ((MOST - 1) << 8):
                word = gl.atomic_add(counter, 0, sem="acquire")
            count = ((word >> 12) & 0xF) + 1
            index = rank - 1 - PROGRAMS + count
    return index, count


@gluon.jit
def leave(counter, count, HELPERS: gl.constexpr):
    """After its part, by each that finished the block: the last of them clears the word."""
    if HELPERS == 1:
        gl.atomic_xchg(counter, 0, sem="relaxed")
    else:
        before = gl.atomic_add(counter, 1 << 24, sem="relaxed")
        if before >> 24 == count - 1:
            gl.atomic_xchg(counter, 0, sem="relaxed")
