"""exp, log and sums whose bits depend on their operands alone: the same on every device, in every shape, at every place in a tensor.

A library's exp may treat the tail of a vector otherwise than its body, and a library's sum picks its order by shape. Here everything is
a written-out chain of single fp32 operations (multiply, add, integer shifts), each rounded once to nearest even, so that a GPU kernel
that does the same operations in the same order, without fused multiply-add and with subnormals kept, gives the same bits.
Knows nothing of who calls it.
"""

import math

import torch
from torch import Tensor

# ln 2 in two parts: the high one has 9 significant bits, so that n * _LN2_HIGH is exact for every exponent n of fp32.
_LN2_HIGH = 0.693359375
_LN2_LOW = float.fromhex("-0x1.bd0106p-13")
_LOG2_E = float.fromhex("0x1.715476p+0")

EXP_UNDERFLOW = -86.5
EXP_OVERFLOW = 88.375
# 2 / k! for k = 7 .. 0, each rounded to fp32. Truncation error on |r| <= ln(2)/2 is below 0.1 ulp; the factor 2 is taken back by the scale.
_EXP_COEFFICIENTS = tuple(
    float.fromhex(c)
    for c in (
        "0x1.a01a02p-12",
        "0x1.6c16c2p-9",
        "0x1.111112p-6",
        "0x1.555556p-4",
        "0x1.555556p-2",
        "0x1p+0",
        "0x1p+1",
        "0x1p+1",
    )
)
# Minimax fit of (log(1+f) - f + f*f/2) / f^3 on [sqrt(1/2) - 1, sqrt(2) - 1], degree 7 .. 0, each rounded to fp32; error below 0.1 ulp of log(1+f).
_LOG_COEFFICIENTS = tuple(
    float.fromhex(c)
    for c in (
        "-0x1.38b576p-4",
        "0x1.055b68p-3",
        "-0x1.0d8542p-3",
        "0x1.22da1ep-3",
        "-0x1.547244p-3",
        "0x1.99a008p-3",
        "-0x1.000226p-2",
        "0x1.555554p-2",
    )
)
_SQRT_HALF_BITS = 0x3F3504F3
_MANTISSA_BITS = 0x007FFFFF


def exp_f32(x: Tensor) -> Tensor:
    """e**x of an fp32 tensor of any shape, at most 2 ulp off.

    Below EXP_UNDERFLOW the result is exactly 0 (so no result is subnormal; exp(-inf) = 0), above EXP_OVERFLOW it is inf; NaN stays NaN.
    """
    assert x.dtype == torch.float32
    clamped = x.clamp(EXP_UNDERFLOW, EXP_OVERFLOW)
    n = (clamped * _LOG2_E).round_()
    r = clamped.sub_(n * _LN2_HIGH).sub_(n * _LN2_LOW)
    y = _horner(r, _EXP_COEFFICIENTS)
    # The coefficients carry a factor 2, so the scale is 2^(n-1), whose exponent field n - 1 + 127 is that of a normal number.
    y.mul_(n.to(torch.int32).add_(126).bitwise_left_shift_(23).view(torch.float32))
    return y.masked_fill_(x < EXP_UNDERFLOW, 0.0).masked_fill_(x > EXP_OVERFLOW, math.inf)


def log_f32(x: Tensor) -> Tensor:
    """Natural logarithm of an fp32 tensor of any shape, at most 2 ulp off.

    Below the smallest normal number 2^-126 (0 included) the result is -inf; of a negative number or NaN it is NaN; of inf it is inf.
    """
    assert x.dtype == torch.float32
    # x = m * 2^e with m in [sqrt(1/2), sqrt(2)), split in the integers.
    bits = x.view(torch.int32) - _SQRT_HALF_BITS
    e = (bits >> 23).to(torch.float32)
    f = bits.bitwise_and_(_MANTISSA_BITS).add_(_SQRT_HALF_BITS).view(torch.float32) - 1.0
    tail = _horner(f, _LOG_COEFFICIENTS).mul_(f).sub_(0.5).mul_(f * f)
    y = tail.add_(e * _LN2_LOW).add_(f).add_(e.mul_(_LN2_HIGH))
    y.masked_fill_(x < torch.finfo(torch.float32).tiny, -math.inf).masked_fill_(x == math.inf, math.inf)
    return y.masked_fill_(~(x >= 0.0), math.nan)


def tree_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension by halving: the upper half is added to the lower one until one column is left.

    x: [..., n] -> [...]. An odd middle column passes through. The order of additions depends on n alone.
    """
    n = x.shape[-1]
    assert n > 0
    if n == 1:
        return x[..., 0].clone()
    half = (n + 1) // 2
    total = x[..., :half].clone()
    total[..., : n - half] += x[..., half:]
    while half > 1:
        n, half = half, (half + 1) // 2
        total[..., : n - half] += total[..., half:n]
    return total[..., 0]


def _horner(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Polynomial in x, highest coefficient first; product and sum are separate tensor operations, so each is rounded."""
    y = x * coefficients[0]
    for c in coefficients[1:-1]:
        y.add_(c).mul_(x)
    return y.add_(coefficients[-1])
