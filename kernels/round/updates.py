"""Differences of a table that stays on the device, written there: kernel and launcher."""

# Constexprs are written in capitals; device functions have no types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from espalier.kernels.round.integers import require_integers

_BLOCK = 128


# The updates are a part of a round's packed inputs, at any address.
@triton.jit(do_not_specialize=["updates", "num_updates", "size"])
def _apply_updates_kernel(updates, tables, num_updates, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(updates + 2 * i, mask=i < num_updates, other=-1)
    here = (place >= 0) & (place < size)
    tl.store(tables + place, tl.load(updates + 2 * i + 1, mask=here, other=0), mask=here)


def apply_updates(updates: Tensor, tables: Tensor) -> None:
    """tables.view(-1)[updates[i, 0]] = updates[i, 1], each place at most once; a place that the tables do not have is skipped.

    updates: int32 [n, 2]; places below 0 are padding. tables: int32 [slots, max_blocks], fewer than 2^31 entries. Both contiguous.
    Raises ValueError naming what does not fit.
    """
    num_updates = updates.shape[0]
    require_integers("updates", updates, num_updates, 2)
    require_integers("tables", tables, *tables.shape)
    if num_updates == 0:
        return
    grid = (triton.cdiv(num_updates, _BLOCK),)
    _apply_updates_kernel[grid](updates, tables, num_updates, tables.numel(), BLOCK=_BLOCK, num_warps=4)
