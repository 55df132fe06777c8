"""How prompt kernels end a tile: totals in shared memory -> rotation, scales, bias, rounding, stores. Gluon device functions.

Arithmetic: `linear/reference.py`, every operation a single fp32 one (compile with `enable_fp_fusion=False`). Knows no product.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_TOTALS: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))


@gluon.jit
def stage_in_registers(v, BIT: gl.constexpr):
    """One stage of the butterfly over the columns of [tokens, 128]; column bit BIT lies in registers."""
    TOKENS: gl.constexpr = v.shape[0]
    HALF: gl.constexpr = 1 << BIT
    low, high = v.reshape([TOKENS, 64 // HALF, 2, HALF]).permute((0, 1, 3, 2)).split()
    return gl.join(low + high, low - high).permute((0, 1, 3, 2)).reshape([TOKENS, 128])


@gluon.jit
def stage_in_lanes(v, n, BIT: gl.constexpr, LANE_BIT: gl.constexpr):
    """The same; n: columns, whose bit BIT is bit LANE_BIT of the lane."""
    if LANE_BIT == 0:
        other = _of_lane(v, "1")
    elif LANE_BIT == 1:
        other = _of_lane(v, "2")
    else:
        other = _of_lane(v, "4")
    sign = (1 - 2 * ((n >> BIT) & 1)).to(gl.float32)[None, :]
    return gl.fma(v, sign, other)  # the product is exact: rounds once, as low + high and low - high do


@gluon.jit
def _of_lane(v, FLIP: gl.constexpr):
    # the value of the lane whose number differs in one bit
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, " + FLIP + ", 31, -1;", "=r,r", [v], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def store_tokens(totals, svh, bias, out, row, T, out_stride, TOKENS: gl.constexpr):
    """totals: fp32 [TOKENS, 128] in shared memory. svh, bias, out: at the block's first column. row: of the first token. 2 warps or more.

    A warp has 4 tokens at a time, each on 8 lanes: column bits 0, 1, 5 and 6 lie in registers, 2 to 4 in lanes, so that reads are free of
    bank conflicts and stores are neighbours.
    """
    CHUNK: gl.constexpr = 4 * gl.num_warps()
    gl.static_assert(CHUNK % 8 == 0)  # a turn of the swizzle
    R: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    chunks = totals._reinterpret(gl.float32, [TOKENS // CHUNK, CHUNK, 128], _TOTALS)
    n = gl.arange(0, 128, gl.SliceLayout(0, R))
    for chunk in range(gl.cdiv(gl.minimum(T - row, TOKENS), CHUNK)):
        v = chunks.index(chunk).load(R)
        v = gl.convert_layout(stage_in_registers(stage_in_registers(v, 0), 1), R, assert_trivial=True)
        v = stage_in_lanes(stage_in_lanes(stage_in_lanes(v, n, 2, 0), n, 3, 1), n, 4, 2)
        v = gl.convert_layout(stage_in_registers(stage_in_registers(v, 5), 6), R, assert_trivial=True)
        v = v * 0.088388347648 * gl.load(svh + n).to(gl.float32)[None, :]
        if bias is not None:
            v = v + gl.load(bias + n)[None, :]
        t = row + chunk * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, R))
        at = t.to(gl.int64)[:, None] * out_stride + n[None, :]
        gl.store(out + at, v.to(out.dtype.element_ty), mask=(t < T)[:, None] & (n < 128)[None, :])
