"""The plain Triton form, interpreted: every rate and codebook, groups, odd widths, both ways of spreading the splits."""

import pytest
import torch

pytest.importorskip("triton")

from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import RATES
from espalier.kernels.linear import plain, reference
from espalier.kernels.linear.exl3_linear import allocate_rotated, allocate_scratch, exl3_linear, scratch_size
from espalier.kernels.linear.group import LinearGroup, pack_group
from tests.support.interpret import interpreted
from tests.support.linears import random_linear, relative_error

# A chain in fp32 against the interpreter's own order of sums.
SUMS = 2e-6


def run(x: torch.Tensor, group: LinearGroup, dtype: torch.dtype) -> torch.Tensor:
    out = torch.full((x.shape[0], group.out_features), torch.nan, dtype=dtype)
    scratch = allocate_scratch(scratch_size(group, x.shape[0]), x.device)
    scratch.partials.fill_(torch.nan)
    rotated = allocate_rotated(group, x.shape[0]).fill_(torch.nan)
    return exl3_linear(x, group, scratch, out=out, rotated=rotated)


@pytest.mark.parametrize("rate", RATES)
@interpreted
def test_every_rate(rate: float) -> None:
    for codebook in Codebook if rate == int(rate) else (Codebook.MUL1,):
        case, x = random_linear(128, 128, rate, codebook), torch.randn(3, 128).half()
        got = run(x, pack_group([case], [None]), torch.float32)
        assert relative_error(got, reference.linear(x, [case], [None], torch.float32)) < SUMS, codebook


@pytest.mark.parametrize("spread", [True, False])
@pytest.mark.parametrize(("rows", "num_in"), [(1, 640), (17, 896), (33, 128), (70, 128)])
@interpreted
def test_rows_and_widths(spread: bool, rows: int, num_in: int) -> None:
    case, x, bias = random_linear(num_in, 256, 3.0, Codebook.MCG), torch.randn(rows, num_in).half(), torch.randn(256)
    few_blocks, plain._FEW_BLOCKS = plain._FEW_BLOCKS, 10**6 if spread else 0
    try:
        got = run(x, pack_group([case], [bias]), torch.float32)
    finally:
        plain._FEW_BLOCKS = few_blocks
    assert relative_error(got, reference.linear(x, [case], [bias], torch.float32)) < SUMS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@interpreted
def test_a_group_of_several_rates(dtype: torch.dtype) -> None:
    members = [
        random_linear(256, 128, 4.0, Codebook.MUL1, 1),
        random_linear(256, 256, 4.0, Codebook.MUL1, 2),
        random_linear(256, 128, 2.5, Codebook.MUL1, 3),
    ]
    biases = [None, torch.randn(256), None]
    x = torch.randn(5, 256).to(dtype)
    group = pack_group(members, biases)
    assert len(group.runs) == 2
    want = reference.linear(x, members, biases, torch.float32)
    got = run(x, group, torch.float32)
    assert relative_error(got, want) < SUMS
    # One unit in the last place at most: the interpreter cuts fp32 down to bf16 where hardware rounds.
    rounded = run(x, group, dtype).float()
    assert ((rounded - got).abs() <= torch.finfo(dtype).eps * got.abs() + 2.0**-24).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@interpreted
def test_the_end_of_a_product_has_the_definitions_bits(dtype: torch.dtype) -> None:
    splits, rows, width = 3, 5, 256
    partials, svh, bias = torch.randn(splits, rows, width), torch.randn(width).half(), torch.randn(width)
    for b in (None, bias):
        out = torch.full((rows, width), torch.nan, dtype=dtype)
        plain._finish[(width // 128, 1)](
            partials, svh, svh if b is None else b, out, rows, width, 0, SPLITS=splits, ROWS=16, HAS_BIAS=b is not None
        )
        assert torch.equal(out, reference.rotate_back(reference.add_in_order(partials), svh, b, dtype))


@interpreted
def test_a_row_does_not_see_the_others() -> None:
    case, x = random_linear(256, 128, 4.0, Codebook.MUL1), torch.randn(20, 256).half()
    group = pack_group([case], [None])
    whole = run(x, group, torch.float32)
    x[7] = torch.nan
    x[19] = torch.inf
    kept = [row for row in range(20) if row not in (7, 19)]
    assert torch.equal(run(x, group, torch.float32)[kept], whole[kept])


@interpreted
def test_narrow_inputs_are_continued_by_zeros() -> None:
    case, x = random_linear(256, 128, 4.0, Codebook.MUL1), torch.randn(2, 200).half()
    group = pack_group([case], [None])
    full = torch.nn.functional.pad(x, (0, 56))
    assert torch.equal(run(x, group, torch.float16), run(full, group, torch.float16))


def test_scratch_suffices_for_every_row_count_below() -> None:
    for widths in ((128,), (1024, 17408), (248320,), (5120,)):
        last = 0
        for rows in range(1, 600):
            size = plain.scratch_size(5120, widths, rows).partials
            needed = [8 * rows * width for width in widths if plain._spreads(width, rows)]
            assert size >= max(last, *needed, 0)
            last = size
        assert plain.scratch_size(5120, widths, 8192).partials <= 80 * 2**18


@pytest.mark.parametrize("capability", [80, 90])
def test_matrix_instructions_take_sixteen_inputs_in_order(capability: int) -> None:
    """Triton permutes inputs among instructions for operands made of bytes, as 3-bit weights are; then sums would not be the definition's."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {"x": "*fp16", "words": "*i32", "partials": "*fp32"}
    numbers = {"rows": "i32", "first_tile": "i32", "tiles": "i32"}
    constants = {"K": 256, "SPLITS": 1, "ROWS": 16, "RATE2": 6, "CODEBOOK": 2}
    signature = pointers | numbers | dict.fromkeys(constants, "constexpr")
    source = ASTSource(plain._partials, signature, constants, {(0,): [["tt.divisibility", 16]]})
    target = GPUTarget("cuda", capability, 32)
    text = triton.compile(source, target=target, options={"num_warps": 4, "num_stages": 2}).asm["ttgir"]
    assert "kWidth = 2" in text
    assert "kWidth = 4" not in text
