"""The tokens that rounds in flight have drawn, kept on the device for the rounds behind them: kernel and launcher."""

# Constexprs are written in capitals; device functions have no types.
# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from torch import Tensor

from espalier.kernels.round.integers import require_integers

_BLOCK = 128


# The place is a part of a round's packed inputs, at any address.
@triton.jit(do_not_specialize=["token_ids", "place", "num_tokens", "num_drawn"])
def _keep_drawn_kernel(token_ids, place, drawn, num_tokens, num_drawn, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(place)
    here = (i < num_tokens) & (first >= 0) & (i < num_drawn - first)
    tl.store(drawn + first + i, tl.load(token_ids + i, mask=here, other=0), mask=here)


def keep_drawn(token_ids: Tensor, place: Tensor, drawn: Tensor) -> None:
    """drawn[place[0] + i] = token_ids[i], as far as `drawn` goes; nothing where place[0] is negative.

    token_ids: int32 [n]. place: int32 [1], read on the device. drawn: int32 [size]. All contiguous. Raises ValueError naming what does not
    fit.
    """
    num_tokens = token_ids.shape[0]
    require_integers("token_ids", token_ids, num_tokens)
    require_integers("place", place, 1)
    require_integers("drawn", drawn, drawn.shape[0])
    if num_tokens == 0:
        return
    grid = (triton.cdiv(num_tokens, _BLOCK),)
    _keep_drawn_kernel[grid](token_ids, place, drawn, num_tokens, drawn.shape[0], BLOCK=_BLOCK, num_warps=4)
