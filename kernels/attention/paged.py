"""Causal attention over a paged cache on a GPU: what the engine calls, and which form serves it. Knows no kernel until it is needed.

A row's bits depend on its query and on the keys and values it sees alone: `splits.py` says how they are summed. Forms: `decode.py` for lanes
of few rows, `prefill.py` for prompt chunks on Hopper, `plain.py` wherever those do not run. All give the same bits on one device class.
"""

import math
from types import ModuleType

import numpy as np
from torch import Tensor

from espalier.kernels.attention.lanes import FEW_ROWS, LaneTable, check_call
from espalier.kernels.attention.splits import EVERY_KEY
from espalier.kernels.counters import Scratch, ScratchSize
from espalier.kernels.device import DeviceClass, device_class

HOPPER = (9, 0)


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lanes: LaneTable,
    scratch: Scratch,
    *,
    scale: float,
    window: int | None = None,
    out: Tensor,
) -> None:
    """Attention of every row that a lane owns; other rows of `out` are left as they are. Decode lanes and prompt chunks may be mixed.

    q: [rows, heads, head_dim] fp16, bf16 or fp32, rounded to the cache's type first. keys, values: [blocks, kv_heads, block_size, head_dim]
    fp16 or bf16, a row's own key included; what lies behind a lane's end is never used, what lies before it must be finite. Query head h
    reads key-value head h // (heads / kv_heads). scale: of the scores, positive. window: how many of the last keys a row sees, its own
    included; None for all. out: as q, fp16, bf16 or fp32. scratch: of `scratch_size` for these bounds.
    Raises ValueError naming the argument that does not fit.
    """
    check_call(q, keys, values, lanes, window, out)
    if lanes.num_lanes == 0:
        return
    # Weights are powers of two: exp(scale * x) = 2^(factor * x).
    factor = float(np.float32(scale * math.log2(math.e)))
    device = device_class(q.device)
    if not device.gluon:
        _plain().launch(q, keys, values, lanes, factor, window or EVERY_KEY, out, min_rows=1)
        return
    few_rows = lanes.few_rows
    if lanes.min_rows <= few_rows:
        _decode().launch(q, keys, values, lanes, scratch, factor, window, out, max_rows=min(few_rows, lanes.max_rows))
    if lanes.max_rows > few_rows:
        if serves_prompts(device, keys.shape[3]):
            _prefill().launch(q, keys, values, lanes, factor, window or EVERY_KEY, out)
        else:
            _plain().launch(q, keys, values, lanes, factor, window or EVERY_KEY, out, min_rows=few_rows + 1)


def scratch_size(
    device: DeviceClass,
    num_lanes: int,
    max_rows: int,
    max_context: int,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None = None,
) -> ScratchSize:
    """Enough for any call of so many lanes within these bounds; see `LaneTable`. max_rows: no more than the table's `few_rows` counts."""
    if not device.gluon:
        return ScratchSize()
    rows = min(FEW_ROWS, max_rows)
    size: ScratchSize = _decode().scratch_size(num_lanes, rows, max_context, window, heads, kv_heads, head_dim)
    return size


def serves_prompts(device: DeviceClass, head_dim: int) -> bool:
    """Whether `prefill.py` has a form for prompt chunks."""
    return device.capability == HOPPER


def _plain() -> ModuleType:
    from espalier.kernels.attention import plain

    return plain


def _decode() -> ModuleType:
    from espalier.kernels.attention import decode

    return decode


def _prefill() -> ModuleType:
    from espalier.kernels.attention import prefill

    return prefill
