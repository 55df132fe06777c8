"""Probe kernels behind exl3-linear-split-rule.md: EXL3 linears for 1 to 8,192 rows under one split rule, 4 bits a weight.

They gave the readings of that page (one H200, PyTorch 2.11, Triton 3.6) and are proofs to measure and to learn from, not code to import:
one bit rate, no rotations, no bias, K a multiple of 64 x SPLITS. Four forms form the same partial sums and add them in the order of the
splits, so that a row has the same bits in each:

* `rows_mma`: 1 to 32 rows on `mma.sync` (portable, sm_80 on), one split a program, x by cp.async;
* `rows_wgmma`: 64 and 128 rows on `wgmma` (sm_90), one split a program, x by TMA;
* `team`: prompts on `wgmma` (sm_90), warp-specialized and persistent, running totals in shared memory;
* `prompt_mma`: prompts on `mma.sync` (portable), running totals in L2.

Run on a machine with an NVIDIA GPU of compute capability 9.0:

    python exl3_linear_probes.py             # check, then time the table's rows
    python exl3_linear_probes.py --check     # bit equality and error against float64 only
"""
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)

import argparse
import time
from collections.abc import Callable

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

MCG, MUL1, MUL1_PRMT = 0, 1, 2  # codebooks; the last joins a pair of byte sums by PRMT instead of IMAD (same values)


# ---- decode: 16 columns x 64 rows of weights a warp, straight into A fragments ----


@gluon.jit
def window(a, b, sel: gl.constexpr):
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, " + sel + ";", "=r,r,r", [b, a], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def half2_of(states, CODEBOOK: gl.constexpr):
    # states: uint32 [..., 2], a pair of neighbouring 16-bit states -> fp16 [..., 2]
    if CODEBOOK == 1:
        return gl.inline_asm_elementwise(
            """{
            .reg .b32 t0, t1, s0, s1, kk, bb;
            mov.b32 kk, 0x1eee1eee;
            mov.b32 bb, 0xc931c931;
            mul.lo.u32 t0, $1, 0x83DCD12D;
            mul.lo.u32 t1, $2, 0x83DCD12D;
            dp4a.u32.u32 s0, t0, 0x01010101, 0x64006400;
            dp4a.u32.u32 s1, t1, 0x01010101, 0;
            mad.lo.u32 s0, s1, 65536, s0;
            fma.rn.f16x2 $0, s0, kk, bb;
            }""",
            "=r,r,r",
            [states],
            dtype=gl.float16,
            is_pure=True,
            pack=2,
        )
    elif CODEBOOK == 2:  # noqa: RET505 (a compile-time branch)
        return gl.inline_asm_elementwise(
            """{
            .reg .b32 t0, t1, s0, s1, kk, bb;
            mov.b32 kk, 0x1eee1eee;
            mov.b32 bb, 0xc931c931;
            mul.lo.u32 t0, $1, 0x83DCD12D;
            mul.lo.u32 t1, $2, 0x83DCD12D;
            dp4a.u32.u32 s0, t0, 0x01010101, 0x6400;
            dp4a.u32.u32 s1, t1, 0x01010101, 0x6400;
            prmt.b32 s0, s0, s1, 0x5410;
            fma.rn.f16x2 $0, s0, kk, bb;
            }""",
            "=r,r,r",
            [states],
            dtype=gl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return gl.inline_asm_elementwise(
            """{
            .reg .b32 t0, t1;
            .reg .f16 l0, h0, l1, h1;
            mul.lo.u32 t0, $1, 0xCBAC1FED;
            mul.lo.u32 t1, $2, 0xCBAC1FED;
            lop3.b32 t0, t0, 0x8fff8fff, 0x3b603b60, 0x6a;
            lop3.b32 t1, t1, 0x8fff8fff, 0x3b603b60, 0x6a;
            mov.b32 {l0, h0}, t0;
            mov.b32 {l1, h1}, t1;
            add.rn.f16 l0, l0, h0;
            add.rn.f16 l1, l1, h1;
            mov.b32 $0, {l0, l1};
            }""",
            "=r,r,r",
            [states],
            dtype=gl.float16,
            is_pure=True,
            pack=2,
        )


@gluon.jit
def decode(a, b, A: gl.constexpr, TILES: gl.constexpr, CODEBOOK: gl.constexpr):
    # b, a: uint32 [32 TILES, 4], the words of a lane and of the lane before it in four k-tiles -> fp16 [16 TILES, 64]
    a = a & 0xFFFF
    c = gl.inline_asm_elementwise(
        "shf.r.wrap.b32 $0, $1, $2, 4;", "=r,r,r", [b, a], dtype=gl.uint32, is_pure=True, pack=1
    )
    d = gl.inline_asm_elementwise("shr.b32 $0, $1, 4;", "=r,r", [a], dtype=gl.uint32, is_pure=True, pack=1)
    w0 = window(d, c, "0x7643")
    w2 = window(d, c, "0x7632")
    w4 = window(d, c, "0x7621")
    w6 = window(d, c, "0x7610")
    w1 = window(a, b, "0x7643")
    w3 = window(a, b, "0x7632")
    w5 = window(a, b, "0x7621")
    w7 = window(a, b, "0x7610")
    h01, h23 = half2_of(gl.join(w0, w1), CODEBOOK), half2_of(gl.join(w2, w3), CODEBOOK)
    h45, h67 = half2_of(gl.join(w4, w5), CODEBOOK), half2_of(gl.join(w6, w7), CODEBOOK)
    q = gl.join(gl.join(h01, h23), gl.join(h45, h67))  # [lane, k-tile, k bit 0, k bit 3, n bit 3]
    q = q.reshape([TILES, 8, 4, 4, 2, 2, 2]).permute((0, 6, 1, 3, 5, 2, 4)).reshape([16 * TILES, 64])
    return gl.convert_layout(q, A, assert_trivial=True)


@gluon.jit
def word_offsets(tile, BEFORE: gl.constexpr, TILES: gl.constexpr, W: gl.constexpr):
    # offsets of the words of `TILES` column tiles from `tile` on, in one row of four k-tiles: 16 bytes a lane
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [W, 1], [1, 0])
    lane = gl.arange(0, 32 * TILES, gl.SliceLayout(1, L))
    kt = gl.arange(0, 4, gl.SliceLayout(0, L))
    TURN: gl.constexpr = 31 if BEFORE else 0
    off = (tile + lane // 32) * 128 + (lane + TURN) % 32 * 4
    return off[:, None] + kt[None, :]


# ---- partial sums: a thread's accumulators as groups of four, 16 bytes a lane; the place is private to the thread ----


@gluon.jit
def own(acc, R: gl.constexpr, BT: gl.constexpr, W: gl.constexpr):
    # [16 R W, BT] -> [R BT/8, 32 W, 4]
    P: gl.constexpr = gl.BlockedLayout([R * BT // 8, 1, 4], [1, 32, 1], [1, W, 1], [2, 1, 0])
    v = acc.reshape([R, W, 2, 8, BT // 8, 4, 2]).permute((0, 4, 1, 3, 5, 2, 6)).reshape([R * BT // 8, 32 * W, 4])
    return gl.convert_layout(v, P)


@gluon.jit
def disown(v, ACC: gl.constexpr, R: gl.constexpr, BT: gl.constexpr, W: gl.constexpr):
    v = v.reshape([R, BT // 8, W, 8, 4, 2, 2]).permute((0, 2, 5, 3, 1, 4, 6)).reshape([16 * R * W, BT])
    return gl.convert_layout(v, ACC)


@gluon.jit
def own_offsets(GROUPS: gl.constexpr, W: gl.constexpr):
    P: gl.constexpr = gl.BlockedLayout([GROUPS, 1, 4], [1, 32, 1], [1, W, 1], [2, 1, 0])
    i = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, P)))
    t = gl.arange(0, 32 * W, gl.SliceLayout(0, gl.SliceLayout(2, P)))
    c = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, P)))
    return (i * (128 * W))[:, None, None] + (t * 4)[None, :, None] + c[None, None, :]


@gluon.jit
def quarters(v, GROUPS: gl.constexpr, W: gl.constexpr):
    # [4 GROUPS, 32 W, 4] -> four of [GROUPS, 32 W, 4]: registers keep their place, and a quarter at a time needs few more
    Q: gl.constexpr = gl.BlockedLayout([GROUPS, 1, 4], [1, 32, 1], [1, W, 1], [2, 1, 0])
    a, b = v.reshape([2, 2, GROUPS, 32 * W, 4]).permute((2, 3, 4, 1, 0)).split()
    q0, q1 = a.split()
    q2, q3 = b.split()
    return gl.convert_layout(q0, Q), gl.convert_layout(q1, Q), gl.convert_layout(q2, Q), gl.convert_layout(q3, Q)


@gluon.jit
def whole(q0, q1, q2, q3, GROUPS: gl.constexpr, W: gl.constexpr):
    q = gl.join(gl.join(q0, q1), gl.join(q2, q3))
    return q.permute((4, 3, 0, 1, 2)).reshape([4 * GROUPS, 32 * W, 4])


@gluon.jit
def store_out(acc, out, T, row, col, ACC: gl.constexpr, N: gl.constexpr, COLS: gl.constexpr, BT: gl.constexpr):
    n = col + gl.arange(0, COLS, gl.SliceLayout(1, ACC))
    t = row + gl.arange(0, BT, gl.SliceLayout(0, ACC))
    mask = (t < T)[None, :] & (n < N)[:, None]
    gl.store(out + t[None, :] * N + n[:, None], acc.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def finish(
    acc,
    part,
    out,
    counters,
    T,
    ACC: gl.constexpr,
    N: gl.constexpr,
    BT: gl.constexpr,
    W: gl.constexpr,
    SPLITS: gl.constexpr,
):
    # deposit this split's partial; the block's last program to arrive adds all of them in the order of the splits
    pid_n, pid_k, pid_t = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    SZ: gl.constexpr = 16 * W * BT
    block = pid_t * (N // (16 * W)) + pid_n
    p = part + block * (SPLITS * SZ) + own_offsets(BT // 8, W)
    gl.store(p + pid_k * SZ, own(acc, 1, BT, W))
    gl.thread_barrier()
    seen = gl.atomic_add(counters + block, 1, sem="acq_rel")
    if seen == SPLITS - 1:
        total = gl.load(p, cache_modifier=".cg")
        for k in range(1, SPLITS):
            total += gl.load(p + k * SZ, cache_modifier=".cg")
        store_out(disown(total, ACC, 1, BT, W), out, T, pid_t * BT, pid_n * (16 * W), ACC, N, 16 * W, BT)
        gl.atomic_xchg(counters + block, 0, sem="relaxed")


# ---- few rows: one split a program ----


@gluon.jit(do_not_specialize=["T"])
def rows_mma(
    x,
    words,
    out,
    part,
    counters,
    T,
    K: gl.constexpr,
    N: gl.constexpr,
    BT: gl.constexpr,
    W: gl.constexpr,
    S: gl.constexpr,
    SPLITS: gl.constexpr,
    CODEBOOK: gl.constexpr,
):
    # S == steps: the split's x lies whole in shared memory and the loop has no barrier; else a ring of S stages
    pid_n, pid_k, pid_t = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    STEPS: gl.constexpr = K // 64 // SPLITS
    ROW: gl.constexpr = N // 16 * 128
    XL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    xs = gl.allocate_shared_memory(gl.float16, [S, BT, 64], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    pb = words + pid_k * (STEPS * ROW) + word_offsets(pid_n * W, False, W, W)
    pa = words + pid_k * (STEPS * ROW) + word_offsets(pid_n * W, True, W, W)
    b0, a0 = gl.load(pb).to(gl.uint32), gl.load(pa).to(gl.uint32)
    b1, a1 = gl.load(pb + ROW).to(gl.uint32), gl.load(pa + ROW).to(gl.uint32)
    t = pid_t * BT + gl.arange(0, BT, gl.SliceLayout(1, XL))
    k = gl.arange(0, 64, gl.SliceLayout(0, XL))
    xp = x + t[:, None] * K + (pid_k * (STEPS * 64) + k)[None, :]
    xm = (t < T)[:, None] & (k < 64)[None, :]
    if S == STEPS:
        for i in range(S):
            async_copy.async_copy_global_to_shared(xs.index(i), xp + i * 64, mask=xm)
        async_copy.commit_group()
    else:
        for i in gl.static_range(S - 1):
            async_copy.async_copy_global_to_shared(xs.index(i), xp + i * 64, mask=xm)
            async_copy.commit_group()
    pb += 2 * ROW
    pa += 2 * ROW
    acc = gl.zeros([16 * W, BT], gl.float32, ACC)
    if S == STEPS:
        async_copy.wait_group(0)
        gl.thread_barrier()
    UNROLL: gl.constexpr = 2 if STEPS % 2 == 0 else 1  # two words in flight: unrolled by two they need no moves
    for s0 in range(STEPS // UNROLL):
        for u in gl.static_range(UNROLL):
            s = s0 * UNROLL + u
            if S != STEPS:
                async_copy.wait_group(S - 2)
                gl.thread_barrier()
                nx = s + S - 1
                async_copy.async_copy_global_to_shared(xs.index(nx % S), xp + nx * 64, mask=xm & (nx < STEPS))
                async_copy.commit_group()
            b2, a2 = gl.load(pb).to(gl.uint32), gl.load(pa).to(gl.uint32)
            ahead = gl.where(s + 3 < STEPS, ROW, 0)
            pb += ahead
            pa += ahead
            w = decode(a0, b0, A, W, CODEBOOK)
            acc = mma_v2(w, xs.index(s % S).permute((1, 0)).load(B), acc)
            b0, a0 = b1, a1
            b1, a1 = b2, a2
    async_copy.wait_group(0)  # masked copies of the ring still write zeros, and finish() reuses the memory
    gl.thread_barrier()
    finish(acc, part, out, counters, T, ACC, N, BT, W, SPLITS)


@gluon.jit(do_not_specialize=["T"])
def rows_wgmma(
    xd,
    words,
    out,
    part,
    counters,
    T,
    K: gl.constexpr,
    N: gl.constexpr,
    BT: gl.constexpr,
    W: gl.constexpr,
    S: gl.constexpr,
    SPLITS: gl.constexpr,
    CODEBOOK: gl.constexpr,
):
    # x by TMA in a ring of S stages; the next step's weights are decoded while wgmma works on this one's
    pid_n, pid_k, pid_t = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, BT, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    STEPS: gl.constexpr = K // 64 // SPLITS
    ROW: gl.constexpr = N // 16 * 128
    xs = gl.allocate_shared_memory(gl.float16, [S, BT, 64], xd.layout)
    bars = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    pb = words + pid_k * (STEPS * ROW) + word_offsets(pid_n * W, False, W, W)
    pa = words + pid_k * (STEPS * ROW) + word_offsets(pid_n * W, True, W, W)
    b0, a0 = gl.load(pb).to(gl.uint32), gl.load(pa).to(gl.uint32)
    b1, a1 = gl.load(pb + ROW).to(gl.uint32), gl.load(pa + ROW).to(gl.uint32)
    for i in gl.static_range(S):
        mbarrier.init(bars.index(i), count=1)
    for i in gl.static_range(S - 1):
        mbarrier.expect(bars.index(i), BT * 64 * 2)
        tma.async_copy_global_to_shared(xd, [pid_t * BT, (pid_k * STEPS + i) * 64], bars.index(i), xs.index(i))
    pb += 2 * ROW
    pa += 2 * ROW
    b2, a2 = gl.load(pb).to(gl.uint32), gl.load(pa).to(gl.uint32)
    acc = gl.zeros([16 * W, BT], gl.float32, ACC)
    w = decode(a0, b0, A, W, CODEBOOK)
    UNROLL: gl.constexpr = 2 if STEPS % 2 == 0 else 1
    for s0 in range(STEPS // UNROLL):
        for u in gl.static_range(UNROLL):
            s = s0 * UNROLL + u
            st = s % S
            mbarrier.wait(bars.index(st), (s // S) & 1)
            acc = warpgroup_mma(w, xs.index(st).permute((1, 0)), acc, is_async=True)
            wn = decode(a1, b1, A, W, CODEBOOK)
            b1, a1 = b2, a2
            ahead = gl.where(s + 3 < STEPS, ROW, 0)
            pb += ahead
            pa += ahead
            b2, a2 = gl.load(pb).to(gl.uint32), gl.load(pa).to(gl.uint32)
            acc, w, wn = warpgroup_mma_wait(0, deps=[acc, w, wn])
            gl.thread_barrier()
            nx = s + S - 1
            more = nx < STEPS
            nst = nx % S
            mbarrier.expect(bars.index(nst), BT * 64 * 2, pred=more)
            at = [pid_t * BT, (pid_k * STEPS + nx) * 64]
            tma.async_copy_global_to_shared(xd, at, bars.index(nst), xs.index(nst), pred=more)
            w = wn
    finish(acc, part, out, counters, T, ACC, N, BT, W, SPLITS)


# ---- prompts on wgmma: whole tiles round robin, the rest dealt out split by split ----


@gluon.jit
def segments(T, NB: gl.constexpr, BT: gl.constexpr, SPLITS: gl.constexpr):
    pid, programs = gl.program_id(0), gl.num_programs(0)
    tiles = NB * gl.cdiv(T, BT)
    full = tiles // programs
    rest = (tiles - full * programs) * SPLITS
    r0, r1 = pid * rest // programs, (pid + 1) * rest // programs
    return full + gl.cdiv(r1, SPLITS) - r0 // SPLITS


@gluon.jit
def segment(it, T, NB: gl.constexpr, BT: gl.constexpr, SPLITS: gl.constexpr, GROUP: gl.constexpr):
    # this program's `it`-th piece: (tile among the shared ones, column block, token block, splits j0..j1, shared splits)
    pid, programs = gl.program_id(0), gl.num_programs(0)
    nt = gl.cdiv(T, BT)
    tiles = NB * nt
    full = tiles // programs
    rest = (tiles - full * programs) * SPLITS
    tile = it * programs + pid
    j0 = 0
    j1 = SPLITS
    if it >= full:
        r0, r1 = pid * rest // programs, (pid + 1) * rest // programs
        shared = r0 // SPLITS + it - full
        tile = full * programs + shared
        j0 = gl.maximum(r0 - shared * SPLITS, 0)
        j1 = gl.minimum(r1 - shared * SPLITS, SPLITS)
    group = tile // (GROUP * nt)  # GROUP column blocks share each x tile in L2
    width = gl.minimum(NB - group * GROUP, GROUP)
    inside = tile % (GROUP * nt)
    return tile - full * programs, group * GROUP + inside % width, inside // width, j0, j1, rest


@gluon.jit
def producer(
    xd,
    xs,
    ready,
    free,
    T,
    K: gl.constexpr,
    N: gl.constexpr,
    BT: gl.constexpr,
    S: gl.constexpr,
    SPLITS: gl.constexpr,
    GROUP: gl.constexpr,
):
    NB: gl.constexpr = N // 128
    STEPS: gl.constexpr = K // 64 // SPLITS
    g = 0
    for it in range(segments(T, NB, BT, SPLITS)):
        _, _, pid_t, j0, j1, _ = segment(it, T, NB, BT, SPLITS, GROUP)
        for s in range(j0 * STEPS, j1 * STEPS):
            st = g % S
            mbarrier.wait(free.index(st), ((g // S) & 1) ^ 1)
            mbarrier.expect(ready.index(st), BT * 64 * 2)
            tma.async_copy_global_to_shared(xd, [pid_t * BT, s * 64], ready.index(st), xs.index(st))
            g += 1


@gluon.jit
def consumer(
    WG: gl.constexpr,
    xs,
    totals,
    ready,
    free,
    words,
    out,
    od,
    part,
    counters,
    T,
    K: gl.constexpr,
    N: gl.constexpr,
    BT: gl.constexpr,
    S: gl.constexpr,
    SPLITS: gl.constexpr,
    GROUP: gl.constexpr,
    CODEBOOK: gl.constexpr,
    TMA_OUT: gl.constexpr,
):
    # a warpgroup: 64 columns x BT tokens; one wgmma group is always queued behind the one that runs
    W: gl.constexpr = 4
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[W, 1], instr_shape=[16, BT, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    Q: gl.constexpr = gl.BlockedLayout([BT // 32, 1, 4], [1, 32, 1], [1, W, 1], [2, 1, 0])
    TL: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [2, 1, 0])
    NB: gl.constexpr = N // 128
    STEPS: gl.constexpr = K // 64 // SPLITS
    ROW: gl.constexpr = N // 16 * 128
    SZ: gl.constexpr = 64 * BT
    G: gl.constexpr = BT // 32
    programs = gl.num_programs(0)
    slot = part + (gl.program_id(0) * 2 + WG) * (SPLITS * SZ)
    low = totals.index(2 * WG)._reinterpret(gl.float32, [2 * G, 128, 4], TL)
    high = totals.index(2 * WG + 1)._reinterpret(gl.float32, [2 * G, 128, 4], TL)
    t0, t1 = low.slice(0, G, dim=0), low.slice(G, G, dim=0)
    t2, t3 = high.slice(0, G, dim=0), high.slice(G, G, dim=0)
    g = 0
    for it in range(segments(T, NB, BT, SPLITS)):
        shared, pid_n, pid_t, j0, j1, rest = segment(it, T, NB, BT, SPLITS, GROUP)
        n64 = pid_n * 2 + WG
        last = (j1 - j0) * STEPS
        pb = words + j0 * (STEPS * ROW) + word_offsets(n64 * 4, False, W, W)
        pa = words + j0 * (STEPS * ROW) + word_offsets(n64 * 4, True, W, W)
        b, a = gl.load(pb).to(gl.uint32), gl.load(pa).to(gl.uint32)
        w = decode(a, b, A, W, CODEBOOK)
        before = w
        pb += ROW
        pa += ROW
        b, a = gl.load(pb).to(gl.uint32), gl.load(pa).to(gl.uint32)
        step = 0
        acc = gl.zeros([64, BT], gl.float32, ACC)
        for j in range(j0, j1):
            acc = gl.zeros([64, BT], gl.float32, ACC)
            for i in range(STEPS):
                st = g % S
                mbarrier.wait(ready.index(st), (g // S) & 1)
                acc = warpgroup_mma(w, xs.index(st).permute((1, 0)), acc, is_async=True)
                acc, before = warpgroup_mma_wait(1, deps=[acc, before])
                gl.thread_barrier()
                mbarrier.arrive(free.index((g + S - 1) % S), count=1, pred=i > 0)
                wn = decode(a, b, A, W, CODEBOOK)
                ahead = gl.where(step + 2 < last, ROW, 0)
                pb += ahead
                pa += ahead
                b, a = gl.load(pb).to(gl.uint32), gl.load(pa).to(gl.uint32)
                before = w
                w = wn
                g += 1
                step += 1
            acc, w, before = warpgroup_mma_wait(0, deps=[acc, w, before])
            gl.thread_barrier()
            mbarrier.arrive(free.index((g + S - 1) % S), count=1)
            if j0 > 0:  # an earlier program has the head of this tile: every later split's sum is kept apart
                gl.store(slot + j * SZ + own_offsets(BT // 8, W), own(acc, 1, BT, W))
            else:
                q0, q1, q2, q3 = quarters(own(acc, 1, BT, W), G, W)
                if j == 0:
                    if TMA_OUT:
                        tma.store_wait(0)  # the last tile's output left from this memory
                        gl.thread_barrier()
                    t0.store(q0)
                    t1.store(q1)
                    t2.store(q2)
                    t3.store(q3)
                elif j < SPLITS - 1:
                    q0 += t0.load(Q)
                    t0.store(q0)
                    q1 += t1.load(Q)
                    t1.store(q1)
                    q2 += t2.load(Q)
                    t2.store(q2)
                    q3 += t3.load(Q)
                    t3.store(q3)
        done = j1 - j0 == SPLITS
        if done:
            q0, q1, q2, q3 = quarters(own(acc, 1, BT, W), G, W)
            q0 += t0.load(Q)
            q1 += t1.load(Q)
            q2 += t2.load(Q)
            q3 += t3.load(Q)
            acc = disown(whole(q0, q1, q2, q3, G, W), ACC, 1, BT, W)
        else:
            if j0 == 0:
                gl.store(slot + own_offsets(G, W), t0.load(Q))
                gl.store(slot + SZ // 4 + own_offsets(G, W), t1.load(Q))
                gl.store(slot + 2 * (SZ // 4) + own_offsets(G, W), t2.load(Q))
                gl.store(slot + 3 * (SZ // 4) + own_offsets(G, W), t3.load(Q))
            u = shared * SPLITS
            first, final = ((u + 1) * programs - 1) // rest, ((u + SPLITS) * programs - 1) // rest
            gl.thread_barrier()
            seen = gl.atomic_add(counters + shared * 2 + WG, 1, sem="acq_rel")
            done = seen == final - first
            if done:
                p = part + WG * (SPLITS * SZ) + own_offsets(BT // 8, W)
                acc = disown(gl.load(p + first * (2 * SPLITS * SZ), cache_modifier=".cg"), ACC, 1, BT, W)
                for k in range((first + 1) * rest // programs - u, SPLITS):
                    c = ((u + k + 1) * programs - 1) // rest
                    more = gl.load(p + c * (2 * SPLITS * SZ) + k * SZ, cache_modifier=".cg")
                    acc += disown(more, ACC, 1, BT, W)
                gl.atomic_xchg(counters + shared * 2 + WG, 0, sem="relaxed")
        if done:
            if TMA_OUT:
                buf = totals.index(2 * WG)
                gl.thread_barrier()
                buf.permute((1, 0)).store(acc.to(gl.float16))
                fence_async_shared()
                gl.thread_barrier()
                tma.async_copy_shared_to_global(od, [pid_t * BT, n64 * 64], buf)
            else:
                store_out(acc, out, T, pid_t * BT, n64 * 64, ACC, N, 64, BT)
    if TMA_OUT:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["T"])
def team(
    xd,
    words,
    out,
    od,
    part,
    counters,
    T,
    K: gl.constexpr,
    N: gl.constexpr,
    BT: gl.constexpr,
    S: gl.constexpr,
    SPLITS: gl.constexpr,
    GROUP: gl.constexpr,
    CODEBOOK: gl.constexpr,
    TMA_OUT: gl.constexpr,
):
    # a producer warp feeds x to two consumer warpgroups; part: [programs, 2, SPLITS, 64 BT], counters: two a shared tile
    xs = gl.allocate_shared_memory(gl.float16, [S, BT, 64], xd.layout)
    totals = gl.allocate_shared_memory(gl.float16, [4, BT, 64], xd.layout)  # fp32 [2, 64, BT]; also stages the output
    ready = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [S, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(S):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    gl.warp_specialize(
        [
            (
                consumer,
                (
                    0,
                    xs,
                    totals,
                    ready,
                    free,
                    words,
                    out,
                    od,
                    part,
                    counters,
                    T,
                    K,
                    N,
                    BT,
                    S,
                    SPLITS,
                    GROUP,
                    CODEBOOK,
                    TMA_OUT,
                ),
            ),
            (
                consumer,
                (
                    1,
                    xs,
                    totals,
                    ready,
                    free,
                    words,
                    out,
                    od,
                    part,
                    counters,
                    T,
                    K,
                    N,
                    BT,
                    S,
                    SPLITS,
                    GROUP,
                    CODEBOOK,
                    TMA_OUT,
                ),
            ),
            (producer, (xd, xs, ready, free, T, K, N, BT, S, SPLITS, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )


# ---- prompts on mma.sync: 32 columns a warp, totals in L2 ----


@gluon.jit
def word_before(b, lane):
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;", "=r,r,r", [b, lane], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit(do_not_specialize=["T"])
def prompt_mma(
    x,
    words,
    out,
    part,
    T,
    K: gl.constexpr,
    N: gl.constexpr,
    BT: gl.constexpr,
    W: gl.constexpr,
    S: gl.constexpr,
    SPLITS: gl.constexpr,
    GROUP: gl.constexpr,
    CODEBOOK: gl.constexpr,
):
    # persistent. The total is added to by RED: one thread owns an address, so its order of addition is program order
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[W, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    NB: gl.constexpr = N // (32 * W)
    STEPS: gl.constexpr = K // 64
    ROW: gl.constexpr = N // 16 * 128
    XL: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [W, 1], [1, 0])
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [W, 1], [1, 0])
    xs = gl.allocate_shared_memory(gl.float16, [S, BT, 64], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    lane = (gl.arange(0, 64 * W, gl.SliceLayout(1, L)) + 31) % 32
    lane = lane.to(gl.uint32)[:, None] + (gl.arange(0, 4, gl.SliceLayout(0, L)) * 0).to(gl.uint32)[None, :]
    nt = gl.cdiv(T, BT)
    slot = part + gl.program_id(0) * (32 * W * BT) + own_offsets(BT // 4, W)
    t = gl.arange(0, BT, gl.SliceLayout(1, XL))
    k = gl.arange(0, 64, gl.SliceLayout(0, XL))
    for tile in range(gl.program_id(0), NB * nt, gl.num_programs(0)):
        group = tile // (GROUP * nt)
        width = gl.minimum(NB - group * GROUP, GROUP)
        inside = tile % (GROUP * nt)
        pid_n, pid_t = group * GROUP + inside % width, inside // width
        xp = x + (pid_t * BT + t)[:, None] * K + k[None, :]
        xm = ((pid_t * BT + t) < T)[:, None] & (k < 64)[None, :]
        async_copy.wait_group(0)  # the copies past the last tile's end were masked, but masked copies still write zeros
        gl.thread_barrier()
        for i in gl.static_range(S - 1):
            async_copy.async_copy_global_to_shared(xs.index(i), xp + i * 64, mask=xm)
            async_copy.commit_group()
        pb = words + word_offsets(pid_n * (2 * W), False, 2 * W, W)
        b = gl.load(pb).to(gl.uint32)
        step = 0
        acc = gl.zeros([32 * W, BT], gl.float32, ACC)
        for j in range(SPLITS):
            acc = gl.zeros([32 * W, BT], gl.float32, ACC)
            for _ in range(STEPS // SPLITS):
                async_copy.wait_group(S - 2)
                gl.thread_barrier()
                nx = step + S - 1
                async_copy.async_copy_global_to_shared(xs.index(nx % S), xp + nx * 64, mask=xm & (nx < STEPS))
                async_copy.commit_group()
                pb += gl.where(step + 1 < STEPS, ROW, 0)
                w = decode(word_before(b, lane), b, A, 2 * W, CODEBOOK)
                b = gl.load(pb).to(gl.uint32)
                acc = mma_v2(w, xs.index(step % S).permute((1, 0)).load(B), acc)
                step += 1
            if j == 0:
                gl.store(slot, own(acc, 2, BT, W))
            elif j < SPLITS - 1:
                gl.atomic_add(slot, own(acc, 2, BT, W), sem="relaxed")
        acc += disown(gl.load(slot, cache_modifier=".cg"), ACC, 2, BT, W)
        store_out(acc, out, T, pid_t * BT, pid_n * (32 * W), ACC, N, 32 * W, BT)


# ---- reference, launch, readings ----

BOX = gl.NVMMASharedLayout(128, 16, 2)


def states(trellis: torch.Tensor) -> torch.Tensor:
    """The 16-bit states [..., 32, 8] of 4-bit tiles, int32 words [..., 32]."""
    word = trellis.to(torch.int64) & 0xFFFFFFFF
    ring = (torch.roll(word, 1, -1) & 0xFFFF) << 32 | word
    return torch.stack([ring >> (28 - 4 * j) & 0xFFFF for j in range(8)], -1)


def weights(trellis: torch.Tensor, codebook: int) -> torch.Tensor:
    """The fp16 weight [K, N] of a trellis, int32 [K/16, N/16, 32]."""
    s = states(trellis)
    if codebook == MCG:
        z = (s * 0xCBAC1FED & 0x8FFF8FFF) ^ 0x3B603B60
        low, high = ((part & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.float16) for part in (z, z >> 16))
        values = (low.double() + high.double()).half()
    else:
        p = s * 0x83DCD12D & 0xFFFFFFFF
        total = (p & 255) + (p >> 8 & 255) + (p >> 16 & 255) + (p >> 24)
        values = ((1024 + total).double() * (1774 * 2.0**-18) - 10.3828125).half()
    k_tiles, n_tiles = values.shape[:2]
    tile = values.view(k_tiles, n_tiles, 8, 4, 2, 2, 2)  # n low bits, k middle bits, n bit 3, k bit 3, k bit 0
    return tile.permute(0, 5, 3, 6, 1, 4, 2).reshape(k_tiles * 16, n_tiles * 16)


def repack(trellis: torch.Tensor) -> torch.Tensor:
    """A lane's words of four k-tiles side by side: [K/64, N/16, 32, 4]; done once at load."""
    k_tiles, n_tiles, _ = trellis.shape
    return trellis.view(k_tiles // 4, 4, n_tiles, 32).permute(0, 2, 3, 1).contiguous()


class Bench:
    """One layer shape: `copies` random weights, to rotate past the L2, and the workspace the kernels share."""

    def __init__(self, k: int, n: int, copies: int = 8) -> None:
        draw = torch.Generator(device="cuda").manual_seed(k)
        self.k, self.n = k, n
        self.trellis = torch.randint(
            -(2**31), 2**31 - 1, (k // 16, n // 16, 32), dtype=torch.int32, device="cuda", generator=draw
        )
        first = repack(self.trellis)
        self.words = [first] + [first[torch.randperm(k // 64, device="cuda")].contiguous() for _ in range(copies - 1)]
        self.x = torch.randn(8448, k, dtype=torch.float16, device="cuda", generator=draw)
        self.part = torch.empty(80 << 20, dtype=torch.float32, device="cuda")
        self.counters = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
        self.programs = torch.cuda.get_device_properties(0).multi_processor_count

    def call(self, form: str, rows: int, tokens: int, splits: int, codebook: int, dtype: torch.dtype = torch.float16):
        """(run, out): `run(i)` computes the product with weight i; `tokens` is the tile's width."""
        k, n, x = self.k, self.n, self.x[:rows]
        out = torch.full((rows, n), float("nan"), dtype=dtype, device="cuda")
        blocks = triton.cdiv(rows, tokens)
        steps = k // 64 // splits
        shape = (rows, k, n, tokens)
        if form == "rows_mma":
            stages = steps if tokens == 8 and steps <= 40 else 4
            kernel, grid = rows_mma, (n // 64, splits, blocks)
            before, after = (x,), (out, self.part, self.counters, *shape, 4, stages, splits, codebook)
        elif form == "rows_wgmma":
            xd = TensorDescriptor.from_tensor(x, [tokens, 64], BOX)
            kernel, grid = rows_wgmma, (n // 64, splits, blocks)
            before, after = (xd,), (out, self.part, self.counters, *shape, 4, 4, splits, codebook)
        elif form == "team":
            xd = TensorDescriptor.from_tensor(x, [tokens, 64], BOX)
            half = dtype == torch.float16
            target = out if half else torch.empty(tokens, n, dtype=torch.float16, device="cuda")
            od = TensorDescriptor.from_tensor(target, [tokens, 64], BOX)
            stages = 3 if tokens == 256 else 8
            kernel, grid = team, (self.programs,)
            before, after = (xd,), (out, od, self.part, self.counters, *shape, stages, splits, 16, codebook, half)
        else:
            kernel, grid = prompt_mma, (min(n // 128 * blocks, 2 * self.programs),)
            before, after = (x,), (out, self.part, *shape, 4, 3, splits, 8, codebook)

        def run(i: int) -> None:
            kernel[grid](*before, self.words[i], *after, num_warps=4)

        return run, out


def check(bench: Bench, splits: int, codebook: int) -> None:
    """Every form against the first, bit for bit, and the first against float64."""
    exact = bench.x[:64].double() @ weights(bench.trellis, codebook).double()
    run, base = bench.call("team", 2048, 256, splits, codebook, torch.float32)
    run(0)
    error = ((base[:64].double() - exact).norm() / exact.norm()).item()
    plan = [("rows_mma", (1, 8, 16, 64), 8), ("rows_mma", (1, 16, 64), 16), ("rows_mma", (32, 64), 32)]
    plan += [
        ("rows_wgmma", (1, 64, 200), 64),
        ("rows_wgmma", (64, 200), 128),
        ("team", (1, 64, 200, 256, 1000, 2048), 256),
    ]
    plan += [("team", (1, 128, 200, 2048), 128), ("prompt_mma", (1, 64, 200, 2048), 128)]
    wrong = []
    for form, counts, tokens in plan:
        for rows in counts:
            run, out = bench.call(form, rows, tokens, splits, codebook, torch.float32)
            run(0)
            run(0)
            if not torch.equal(out, base[:rows]):
                wrong.append((form, tokens, rows))
    left = int(bench.counters.abs().sum())
    print(
        f"{bench.k}x{bench.n} splits {splits} codebook {codebook}: error {error:.1e}, counters {left}, wrong {wrong}",
        flush=True,
    )


def microseconds(run: Callable[[int], None], copies: int, rows: int) -> float:
    """Median time of a call in a replayed CUDA graph that goes round the weights."""
    for i in range(copies):
        run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            run(i)
    times = []
    for _ in range(16):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if rows <= 128:
            graph.replay()
        else:
            time.sleep(0.015)  # prompts run into the power limit: a pause keeps one variant from paying for the last
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / copies)
    return sorted(times)[len(times) // 2]


TABLE = [(1, "rows_mma", 8), (8, "rows_mma", 8), (16, "rows_mma", 16), (32, "rows_mma", 32), (64, "rows_wgmma", 64)]
TABLE += [(128, "rows_wgmma", 128), (128, "team", 128), (256, "team", 256), (512, "team", 256), (2048, "team", 256)]
TABLE += [(8192, "team", 256), (2048, "prompt_mma", 128)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="no timing")
    parser.add_argument("--splits", type=int, default=8)
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, "Triton", triton.__version__)
    for k, n in ((5120, 17408), (17408, 5120), (6144, 5120)):
        bench = Bench(k, n)
        for codebook in (MUL1, MCG) if k == 5120 else (MUL1,):
            check(bench, args.splits, codebook)
        for rows, form, tokens in [] if args.check else TABLE:
            codebook = MUL1_PRMT if form == "rows_mma" else MUL1
            run, _ = bench.call(form, rows, tokens, args.splits, codebook)
            us = microseconds(run, len(bench.words), rows)
            print(f"{k}x{n} {rows:5} rows {form:10} {us:8.1f} us {2e-6 * k * n * rows / us:6.1f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
