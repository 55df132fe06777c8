"""Keys and Gumbel noise in Triton: device functions, bit for bit `reference.gumbel` under the keys of seed and position.

Integer hashing and single fp32 operations. Callers launch with `enable_fp_fusion=False`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import math

import triton
import triton.language as tl

from espalier.kernels.elementary_device import log_normal

_MARGIN = 0.001
_LN2_OF_BITS = tl.constexpr(math.log(2) * 2.0**-23)
_CHORD_START = tl.constexpr(127 * math.log(2) + _MARGIN)
_LOWER_START = tl.constexpr((127 - 0.0861) * math.log(2) - _MARGIN)


@triton.jit
def row_key(seed, position):
    """The uint64 key of the draw at an absolute position: mix64(mix64(seed) + position). seed: uint64. position: any integer >= 0."""
    return mix64(mix64(seed) + position.to(tl.uint64))


@triton.jit
def mix64(x):
    """One output of SplitMix64 (Steele, Lea, Flood 2014) from state x, uint64."""
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def hash32(key, token_ids):
    """uint32 of each token under a uint64 key, as `reference.hash32`. token_ids: int32 of any shape."""
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    return _mix32(_mix32(token_ids.to(tl.uint32) ^ low) + high)


@triton.jit
def gumbel(hashes):
    """Standard Gumbel noise of each hash, fp32; see `reference.gumbel`."""
    v = _tail(hashes)
    upper = (hashes >> 31) == 1
    t = 1.0 - v
    log = log_normal(tl.where(upper, t, v))
    near_one = tl.where(t == 1.0, v, v * tl.div_rn(log, t - 1.0))
    # Both arguments of the outer logarithm are positive and normal: -log v is at least 0.69, near_one about v or more.
    return -log_normal(tl.where(upper, near_one, -log))


@triton.jit
def gumbel_ceiling(hashes):
    """A number that `gumbel` does not exceed, at a third of its price, and at most 0.2 above it.

    The noise is -log L, where L is -log v in the lower half and -log(1 - v) > v + v^2 / 2 in the upper one. A number's bits, read as an
    integer, are the chord of its log2 between powers of two: at most log2, and at least log2 - 0.0861. The margins are for rounding.
    """
    v = _tail(hashes)
    least = tl.where((hashes >> 31) == 1, v + v * (v * 0.5), _LOWER_START - _bits(v) * _LN2_OF_BITS)
    return _CHORD_START - _bits(least) * _LN2_OF_BITS


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True).to(tl.float32)


@triton.jit
def _tail(hashes):
    """fp32(2 * (h mod 2^31) + 1) * 2^-33."""
    return ((hashes << 1) | 1).to(tl.float32) * (2.0**-33)


@triton.jit
def _mix32(x):
    """A bijection of uint32, as `reference._mix32`."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)
