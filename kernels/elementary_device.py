"""exp, log and sums in Triton, bit for bit those of `elementary.py`: device functions to be called from kernels.

A kernel that calls these must be launched with `enable_fp_fusion=False`, so that products and sums stay single IEEE operations.
They run under the interpreter too. Know nothing of who calls them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

import triton
import triton.language as tl

from espalier.kernels import elementary

_LN2_HIGH = tl.constexpr(elementary._LN2_HIGH)
_LN2_LOW = tl.constexpr(elementary._LN2_LOW)
_LOG2_E = tl.constexpr(elementary._LOG2_E)
_UNDERFLOW = tl.constexpr(elementary.EXP_UNDERFLOW)
_OVERFLOW = tl.constexpr(elementary.EXP_OVERFLOW)
_EXP = tl.constexpr(elementary._EXP_COEFFICIENTS)
_LOG = tl.constexpr(elementary._LOG_COEFFICIENTS)
_SQRT_HALF_BITS = tl.constexpr(elementary._SQRT_HALF_BITS)
_MANTISSA_BITS = tl.constexpr(elementary._MANTISSA_BITS)
_INF = tl.constexpr(float("inf"))
_NAN = tl.constexpr(float("nan"))
_TINY = tl.constexpr(2.0**-126)
# x + 1.5 * 2^23 has the nearest integer to x, ties to even, in its low mantissa bits, for |x| < 2^22.
_ROUNDER = tl.constexpr(1.5 * 2.0**23)
_ROUNDER_BITS = tl.constexpr(0x4B400000)
_EIGHTH_ROUNDER = tl.constexpr(1.5 * 2.0**23 - 4.0)
_SUM_IS_ONE = tl.constexpr(-32.0)  # 1 + e**x is 1 from here down, and well before


@triton.jit
def exp_f32(x):
    """e**x of an fp32 tensor, as `elementary.exp_f32`: 0 below -86.5, inf above 88.375, NaN stays NaN."""
    clamped = tl.where(x < _UNDERFLOW, _UNDERFLOW, tl.where(x > _OVERFLOW, _OVERFLOW, x))
    shifted = clamped * _LOG2_E + _ROUNDER
    n = shifted - _ROUNDER
    r = (clamped - n * _LN2_HIGH) - n * _LN2_LOW
    exponent = shifted.to(tl.int32, bitcast=True) - _ROUNDER_BITS
    y = _horner(r, _EXP) * ((exponent + 126) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < _UNDERFLOW, 0.0, tl.where(x > _OVERFLOW, _INF, y))


@triton.jit
def one_plus_exp_eighth(x):
    """(1 + exp_f32(x)) / 8 of fp32 x, bit for bit, up to EXP_OVERFLOW; beyond it some positive finite number.

    In fewer instructions: the power of two is added to the exponent in one of them, and over 8 nothing overflows, nor is the sum's
    reciprocal subnormal. Of NaN it is NaN or not.
    """
    x = tl.minimum(tl.maximum(x, _SUM_IS_ONE), _OVERFLOW)
    shifted = x * _LOG2_E + _EIGHTH_ROUNDER
    n = shifted - _EIGHTH_ROUNDER
    r = tl.fma(n, -_LN2_HIGH, x) - n * _LN2_LOW  # that product is exact
    # The low bits of `shifted` are n - 4: with the factor 2 of the coefficients, e**x / 8. Its other bits are shifted out.
    bits = _horner(r, _EXP).to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True) + 0.125


@triton.jit
def log_f32(x):
    """Natural logarithm of an fp32 tensor, as `elementary.log_f32`: -inf below 2^-126, NaN of negative numbers."""
    y = tl.where(x < _TINY, -_INF, log_normal(x))
    return tl.where(x >= 0.0, tl.where(x == _INF, _INF, y), _NAN)


@triton.jit
def log_normal(x):
    """`log_f32` of fp32 numbers that are known to be positive, finite and normal."""
    bits = x.to(tl.int32, bitcast=True) - _SQRT_HALF_BITS
    e = (bits >> 23).to(tl.float32)
    f = ((bits & _MANTISSA_BITS) + _SQRT_HALF_BITS).to(tl.float32, bitcast=True) - 1.0
    tail = (_horner(f, _LOG) * f - 0.5) * (f * f)
    return ((tail + e * _LN2_LOW) + f) + e * _LN2_HIGH


@triton.jit
def tree_index(column, slot, n, LEVELS: tl.constexpr):
    """(index, valid): which of n elements `tree_sum` wants in each slot. Slots without an element must hold +0.

    The first LEVELS halvings of n elements leave ceil(n / 2^LEVELS) columns; `column` is one of them (0 when LEVELS halvings leave one),
    slot, 0 .. 2^LEVELS - 1, numbers the elements that go into it. column and slot: integer tensors that broadcast; n: a number, a constant
    or not. With ceil(log2 n) levels index rises with slot and is slot itself where n is a power of two, so loads stay coalesced.
    """
    index = column + slot * 0
    valid = index < ((n + (1 << LEVELS) - 1) >> LEVELS)
    for bit in tl.static_range(LEVELS):
        # Halving number LEVELS - bit took `size` columns from `before`.
        size = (n + (1 << (LEVELS - bit)) - 1) >> (LEVELS - bit)
        before = (n + (1 << (LEVELS - bit - 1)) - 1) >> (LEVELS - bit - 1)
        index += ((slot >> bit) & 1) * size
        valid = valid & (index < before)
    return index, valid


@triton.jit
def tree_sum(x, LEVELS: tl.constexpr):
    """Sums over the first dimension in the order of `elementary.tree_sum`: [2^LEVELS] -> a number, [2^LEVELS, columns] -> [columns].

    x: fp32, elements in the slots that `tree_index` gives them, +0 in the others, nothing that is -0. A sum over two is the same in any order.
    """
    for level in tl.static_range(LEVELS):
        if len(x.shape) == 1:
            x = tl.sum(tl.reshape(x, (2, 1 << (LEVELS - 1 - level))), axis=0)
        else:
            x = tl.sum(tl.reshape(x, (2, 1 << (LEVELS - 1 - level), x.shape[1])), axis=0)
    return tl.sum(x, axis=0)


@triton.jit
def _horner(x, COEFFICIENTS: tl.constexpr):
    """Polynomial in x, highest coefficient first."""
    y = x * COEFFICIENTS[0]
    for i in tl.static_range(1, 7):
        y = (y + COEFFICIENTS[i]) * x
    return y + COEFFICIENTS[7]
