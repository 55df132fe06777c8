"""What the fast decode costs in machine code, on every architecture it is made for. Compiles; needs no GPU.

The loop is that of a linear of few rows without its beginning and end: load words, decode, multiply. Budgets are bounds against getting
worse, a little above what was reached (benchmarks/notes/exl3-decode.md).
"""
# ruff: noqa: N803, N806 (compile-time constants of kernels are in capitals, as Triton's own are)
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import functools

import pytest

from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import RATES
from tests.support.sass import MachineCode, compile_kernel

gluon = pytest.importorskip("triton.experimental.gluon")
from triton.experimental.gluon import language as gl  # noqa: E402 (needs Triton)
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2  # noqa: E402

from espalier.kernels.exl3 import decode  # noqa: E402

ARCHITECTURES = (80, 86, 89, 90, 120)
UNREADABLE = 121  # the disassembler in Triton 3.6 does not know it
WEIGHTS = 64  # that a lane decodes in one turn of the loop
# Instructions a weight of mul1 on compute capability 9.0, all that the loop does included. The other codebooks need half an instruction more.
BUDGETS = {1: 5.85, 1.5: 6.2, 2: 5.1, 2.5: 5.8, 3: 5.75, 3.5: 6.0, 4: 4.95, 5: 5.75, 6: 5.6, 7: 5.9, 8: 4.95}
MORE = {Codebook.MUL1: 0.0, Codebook.MCG: 0.55, Codebook.THREE_INST: 0.55}
# Of those, what goes to the multiplier's pipe, which takes one every other cycle: at least 2.5.
MULTIPLIES = 2.8


@gluon.jit
def decode_loop(
    x, words, out, steps, ROW: gl.constexpr, BT: gl.constexpr, RATE2: gl.constexpr, CODEBOOK: gl.constexpr,
):  # fmt: skip
    """out: fp32 [64, BT], one partial sum. steps: an even number. x: fp16 [BT, 64 * steps]."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    XL: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    xs = gl.allocate_shared_memory(gl.float16, [8, BT, 128], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    pointers = decode.word_pointers(words, gl.program_id(0) * 4, 0, ROW, RATE2, 4, 4)
    w0, w1 = decode.load_at(pointers, 0, 4, 4), decode.load_at(pointers, ROW, 4, 4)
    t = gl.arange(0, BT, gl.SliceLayout(1, XL))
    k = gl.arange(0, 128, gl.SliceLayout(0, XL))
    for i in range(steps // 2):
        async_copy.async_copy_global_to_shared(xs.index(i), x + t[:, None] * (64 * steps) + (128 * i + k)[None, :])
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.thread_barrier()
    acc = gl.zeros([64, BT], gl.float32, ACC)
    for i in range(steps // 2):
        for u in gl.static_range(2):
            weights = decode.decode_words(w0, A, 4, RATE2, CODEBOOK)
            if u == 0:
                pointers = decode.advance(pointers, gl.where(i + 1 < steps // 2, 2 * ROW, 0))
            w2 = decode.load_at(pointers, u * ROW, 4, 4)
            acc = mma_v2(weights, xs.index(i).slice(64 * u, 64, dim=1).permute((1, 0)).load(B), acc)
            w0, w1 = w1, w2
    n = gl.program_id(0) * 64 + gl.arange(0, 64, gl.SliceLayout(1, ACC))
    gl.store(out + n[:, None] * BT + gl.arange(0, BT, gl.SliceLayout(0, ACC))[None, :], acc)


@functools.cache
def compiled(rate: float, codebook: Codebook, architecture: int) -> MachineCode:
    constants = {
        "ROW": 17408 * int(2 * rate),
        "BT": 8,
        "RATE2": int(2 * rate),
        "CODEBOOK": codebook.number,
    }
    types = {"x": "*fp16", "words": "*i32", "out": "*fp32", "steps": "i32"}
    return compile_kernel(decode_loop, types, constants, architecture, num_warps=4)


def instructions_a_weight(rate: float, codebook: Codebook, architecture: int) -> float:
    code = compiled(rate, codebook, architecture)
    loop = code.longest_loop()
    assert loop["HMMA"] == 8, "the loop found is not the one that multiplies"
    assert code.stack == 0
    return loop.total() / WEIGHTS


@pytest.mark.parametrize("rate", [3.0, 3.5, 4.0])
def test_no_spill_and_budget(rate: float) -> None:
    assert instructions_a_weight(rate, Codebook.MUL1, 90) < BUDGETS[rate]
    loop = compiled(rate, Codebook.MUL1, 90).longest_loop()
    assert (loop["IMAD"] + loop["IDP"] + loop["HFMA2"]) / WEIGHTS < MULTIPLIES


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a != 90])
def test_every_architecture_is_near_hopper(architecture: int) -> None:
    assert instructions_a_weight(4.0, Codebook.MUL1, architecture) < 1.1 * instructions_a_weight(4.0, Codebook.MUL1, 90)


def test_the_unreadable_architecture_does_not_spill() -> None:
    code, sibling = compiled(4.0, Codebook.MUL1, UNREADABLE), compiled(4.0, Codebook.MUL1, 120)
    assert code.stack == 0 and code.registers == sibling.registers


@pytest.mark.sweep
@pytest.mark.parametrize("rate", RATES)
def test_whole_table(rate: float) -> None:
    for codebook in Codebook if rate == int(rate) else [Codebook.MUL1]:
        hopper = instructions_a_weight(rate, codebook, 90)
        assert hopper < BUDGETS[rate] + MORE[codebook]
        for architecture in ARCHITECTURES:
            assert instructions_a_weight(rate, codebook, architecture) < 1.1 * hopper, (codebook, architecture)
