"""Which tokens each lane has seen, on the device: one word a token and lane, updated by a small kernel as tokens are drawn.

Bit 0 of seen[lane, token] says that the prompt contains the token, the bits above count how often the reply does. Integer sums and ORs do
not depend on order, so tokens may be told in any order and in any cut. A round that draws and observes needs no data from the host.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

import torch
import triton
import triton.language as tl
from torch import Tensor


def empty_history(num_lanes: int, vocab: int, device: torch.device | str) -> Tensor:
    """int32 [num_lanes, vocab], nothing seen. Clear a lane with `seen[lane].zero_()` when a sequence begins."""
    return torch.zeros(num_lanes, vocab, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["num_tokens"])
def _observe_kernel(token_ids, lanes, positions, prompt_lens, seen, vocab, num_tokens, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.load(lanes + i, mask=i < num_tokens, other=-1).to(tl.int64)
    here = lane >= 0
    token = tl.load(token_ids + i, mask=here, other=-1)
    here = here & (token >= 0) & (token < vocab)
    in_reply = tl.load(positions + i, mask=here, other=0) >= tl.load(prompt_lens + lane, mask=here, other=0)
    place = seen + lane * vocab + token
    tl.atomic_add(place, 2, mask=here & in_reply, sem="relaxed")
    tl.atomic_or(place, 1, mask=here & (in_reply == 0), sem="relaxed")


def observe(token_ids: Tensor, lanes: Tensor, positions: Tensor, prompt_lens: Tensor, seen: Tensor) -> None:
    """Notes token_ids[i] of lane lanes[i] at absolute position positions[i], each once; reply from position prompt_lens[lane] on.

    token_ids, lanes: int32 [n]; lanes below 0 are skipped. positions: integers [n]. prompt_lens: integers [num_lanes].
    seen: as `empty_history` makes it. All contiguous.
    """
    num_tokens = token_ids.shape[0]
    for name, tensor in {"token_ids": token_ids, "lanes": lanes, "positions": positions}.items():
        if tensor.shape != (num_tokens,) or not tensor.is_contiguous():
            raise ValueError(f"{name}: must be {num_tokens} integers, contiguous")
    if num_tokens == 0:
        return
    block = 128
    grid = (triton.cdiv(num_tokens, block),)
    _observe_kernel[grid](
        token_ids, lanes, positions, prompt_lens, seen, seen.shape[1], num_tokens, BLOCK=block, num_warps=4
    )
