"""Scores in order, in Triton: scaling, weights, and integers that sort as (value descending, id ascending) does. Device functions.

Bit for bit `reference.scale` and `reference.weights`. Callers launch with `enable_fp_fusion=False`. Know no rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from espalier.kernels.elementary_device import exp_f32
from espalier.kernels.sampling import reference

_WEIGHT_UNITS = tl.constexpr(2.0**reference.WEIGHT_BITS)
_SHARE_BITS = tl.constexpr(reference.SHARE_BITS)
_SHARE_MASK = tl.constexpr((1 << reference.SHARE_BITS) - 1)
_INTEGERS = tl.constexpr(2.0**23)  # fp32 numbers from here on are integers
_NO_TOKEN = tl.constexpr(2**31 - 1)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def scale(scores, best, temperature):
    """(score - best) / temperature, fp32. A quotient by 1 is what it divides, and true division is not cheap."""
    scaled = scores - best
    if temperature != 1.0:
        scaled = tl.div_rn(scaled, temperature)
    return scaled


@triton.jit
def weight(scaled):
    """e^scaled in units of 2^-40, rounded to the nearest integer, ties to even; an integer in fp32. scaled: at most 0."""
    w = exp_f32(scaled) * _WEIGHT_UNITS
    return tl.where(w < _INTEGERS, (w + _INTEGERS) - _INTEGERS, w)


@triton.jit
def share_of(share, total):
    """ceil(share * total / 2^30), int64, by parts that stay within 63 bits. share: at most 2^30. total: int64, below 2^62."""
    share = share.to(tl.int64)
    return share * (total >> _SHARE_BITS) + ((share * (total & _SHARE_MASK) + _SHARE_MASK) >> _SHARE_BITS)


@triton.jit
def rank_word(values):
    """int32 that rises as fp32 values fall; zeros of both signs get the same one. Not for NaN."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return ~(bits ^ ((bits >> 31) & _MAGNITUDE))


@triton.jit
def rank_key(words, token_ids):
    """int64 that rises in order: rank word, then id."""
    return (words.to(tl.int64) << 32) | token_ids.to(tl.int64)


@triton.jit
def value_of(keys):
    """The fp32 value in a rank key."""
    bits = ~((keys >> 32).to(tl.int32))
    return (bits ^ ((bits >> 31) & _MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def id_of(keys):
    """The token id in a rank key, int32."""
    return keys.to(tl.int32)


@triton.jit
def first_of(values, token_ids, value):
    """The lowest id whose value equals `value`."""
    return tl.min(tl.where(values == value, token_ids, _NO_TOKEN), axis=0)
