"""Linears of plain weights: packing, precision against float64, and bits that depend on a row and the weights alone."""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.bits import captured, poisoned, same_bits
from tests.support.interpret import interpreted
from tests.support.sass import compile_kernel, needs_triton

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# Of a sum of n products, by the size of the largest: what the input keeps of fp32, and what summing in fp32 may lose.
BITS = {torch.float16: 21, torch.bfloat16: 15, torch.float32: 23}
SUMMING = 2.0**-22


@contextlib.contextmanager
def bfloat16_products() -> Iterator[None]:
    """Within it the interpreter multiplies bf16; Triton 3.6 would multiply the bits, as integers."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _convert_float, tl

    create_dot = InterpreterBuilder.create_dot

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle(_convert_float(x.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32)

    def create_wide_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_wide_dot)
        yield


def some_weights(dtype: torch.dtype, in_features: int, *widths: int) -> list[Tensor]:
    return [(torch.randn(width, in_features) / in_features**0.5).to(dtype) for width in widths]


def check_product(device: str, dtype: torch.dtype, rows: int, in_features: int, widths: tuple[int, ...]) -> None:
    from espalier.kernels.linear.dense import dense_linear, pack_dense

    weights = some_weights(dtype, in_features, *widths)
    biases = [torch.randn(width).to(dtype) if i % 2 else None for i, width in enumerate(widths)]
    x = torch.randn(rows, in_features) * 10.0 ** torch.randint(-3, 3, (rows, 1))
    group = pack_dense([w.to(device) for w in weights], [b if b is None else b.to(device) for b in biases])
    out = poisoned(rows, group.out_features, device=device)
    dense_linear(x.to(device), group, out)
    column = 0
    for weight, bias, width in zip(weights, biases, group.widths, strict=True):
        want = torch.zeros(rows, width, dtype=torch.float64)
        want[:, : len(weight)] = x.double() @ weight.double().T
        error = x.double().abs() @ weight.double().abs().T * (2.0 ** -BITS[dtype] + SUMMING * math.log2(in_features))
        if bias is not None:
            want[:, : len(weight)] += bias.double()
            error += bias.double().abs() * SUMMING
        got = out[:, column : column + width].cpu().double()
        assert ((got - want).abs()[:, : len(weight)] <= error).all()
        assert not got[:, len(weight) :].any()
        column += width
    # The interpreter rounds to bf16 toward zero.
    for out_dtype in (torch.float16,) if device == "cpu" else (torch.float16, torch.bfloat16):
        rounded = poisoned(rows, group.out_features + 8, dtype=out_dtype, device=device)
        dense_linear(x.to(device), group, rounded[:, :-8])
        assert same_bits(rounded[:, :-8], out.cpu().to(out_dtype).to(device))
        assert rounded[:, -8:].isnan().all()


def check_invariance(device: str, dtype: torch.dtype, in_features: int, width: int, counts: tuple[int, ...]) -> None:
    """Each row of a call of many rows, as it is alone, first, last, among other neighbours, and beside rows that are not finite."""
    from espalier.kernels.linear.dense import dense_linear, pack_dense

    group = pack_dense([weight.to(device) for weight in some_weights(dtype, in_features, width)], [None])
    most = max(counts)
    x = torch.randn(most, in_features, device=device)

    def product(rows: Tensor) -> Tensor:
        out = poisoned(len(rows), width, device=device)
        dense_linear(rows.contiguous(), group, out)
        return out

    together = product(x)
    for row in range(0, most, 5):
        assert same_bits(product(x[row : row + 1]), together[row : row + 1])
    for count in counts:
        assert same_bits(product(x[:count]), together[:count])
        assert same_bits(product(x[most - count :]), together[most - count :])
    order = torch.randperm(most, device=device)
    assert same_bits(product(x[order]), together[order])
    broken = x.clone()
    broken[::2] = torch.nan
    got = product(broken)
    assert same_bits(got[1::2], together[1::2]) and got[::2].isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
@interpreted
def test_interpreted(dtype: torch.dtype) -> None:
    with bfloat16_products():
        check_product("cpu", dtype, 5, 72, (100, 24, 128))
        check_product("cpu", dtype, 17, 256, (128,))


@pytest.mark.parametrize("dtype", FLOATS)
@interpreted
def test_invariance_interpreted(dtype: torch.dtype) -> None:
    with bfloat16_products():
        check_invariance("cpu", dtype, 72, 128, (1, 4, 16, 17, 20))


@interpreted
def test_no_rows_write_nothing() -> None:
    from espalier.kernels.linear.dense import dense_linear, pack_dense

    dense_linear(torch.zeros(0, 64), pack_dense([torch.zeros(128, 64)], [None]), torch.zeros(0, 128))


@needs_triton
def test_a_tied_head_is_not_copied() -> None:
    from espalier.kernels.linear.dense import pack_dense

    table = torch.randn(256, 40).half()
    group = pack_dense([table], [None])
    assert group.weight is table and group.bias is None
    assert (group.in_features, group.widths, group.out_features, group.num_members) == (40, (256,), 256, 1)
    assert pack_dense([table[:, :32]], [None]).weight.is_contiguous()
    assert pack_dense([table[:200]], [None]).weight.shape == (256, 40)


@needs_triton
def test_members_are_padded_with_zeros() -> None:
    from espalier.kernels.linear.dense import pack_dense

    weights, bias = some_weights(torch.bfloat16, 24, 130, 128, 5), torch.randn(5).half()
    group = pack_dense(weights, [None, None, bias])
    assert group.widths == (256, 128, 128) and group.weight.dtype == torch.bfloat16 and group.bias is not None
    padded = torch.zeros(512, 24, dtype=torch.bfloat16)
    padded[:130], padded[256:384], padded[384:389] = weights
    assert same_bits(group.weight, padded)
    assert same_bits(group.bias, torch.cat([torch.zeros(384), bias.float(), torch.zeros(123)]))


@needs_triton
def test_what_cannot_be_packed_is_named() -> None:
    from espalier.kernels.linear.dense import pack_dense

    weight = torch.zeros(128, 64)
    for weights, biases, words in (
        ([weight, weight[:, :32]], [None, None], "differ in its width: .64, 32."),
        ([weight, weight.half()], [None, None], "must share a float dtype"),
        ([weight.int()], [None], "must share a float dtype"),
        ([weight], [torch.zeros(127)], "a bias has .127. numbers, its weight 128 rows"),
    ):
        with pytest.raises(ValueError, match=words):
            pack_dense(weights, biases)


@interpreted
def test_what_does_not_fit_is_named() -> None:
    from espalier.kernels.linear.dense import dense_linear, pack_dense

    group, x, out = pack_dense([torch.zeros(128, 64)], [None]), torch.zeros(3, 64), torch.zeros(3, 128)
    for inputs, outputs, name in (
        (x.half(), out, "x must"),
        (x[:, :32], out, "x must"),
        (torch.zeros(64, 3).T, out, "x must"),
        (x, out[:2], "out must"),
        (x, out.double(), "out must"),
        (x, torch.zeros(128, 3).T, "out must"),
    ):
        with pytest.raises(ValueError, match=name):
            dense_linear(inputs, group, outputs)


@needs_triton
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("width", [4096, 24_576, 151_936])
def test_machine_code(dtype: str, width: int) -> None:
    """16-bit weights meet m16n8k16, never a warp group's instruction; fp32 ones meet fp32; weights arrive asynchronously; nothing spills."""
    from espalier.kernels.linear import dense

    columns, step = dense._tile(width)
    weight = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    code = compile_kernel(
        dense._dense_kernel,
        {"x": "*fp32", "weight": f"*{dtype}", "bias": "*fp32", "out": "*fp32", "rows": "i32", "out_stride": "i32"},
        {"K": 4096, "LOW_SCALE": dense._LOW_SCALE[weight], "HAS_BIAS": True, "ROWS": 16, "COLUMNS": columns, "STEP": step},
        90, num_warps=4, num_stages=dense._STAGES[weight], enable_fp_fusion=False,
    )  # fmt: skip
    opcodes = {opcode for _, opcode, _ in code.instructions}
    matrix = {opcode for opcode in opcodes if opcode.startswith(("HMMA", "HGMMA"))}
    assert matrix == {"fp16": {"HMMA.16816.F32"}, "bf16": {"HMMA.16816.F32.BF16"}, "fp32": set()}[dtype]
    assert "FFMA" in opcodes or dtype != "fp32"
    assert any(opcode.startswith("LDGSTS") for opcode in opcodes) and code.stack == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("rows", "in_features", "widths"),
    [(1, 576, (576, 192, 192)), (17, 1536, (8960, 8960)), (64, 4096, (4096,)), (5, 100, (40_000,)), (130, 896, (33,))],
)
def test_dense(dtype: torch.dtype, rows: int, in_features: int, widths: tuple[int, ...]) -> None:
    check_product("cuda", dtype, rows, in_features, widths)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(576, 1024), (4096, 4096), (2048, 24_576), (1000, 49_152)])
def test_invariance(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    check_invariance("cuda", dtype, *shape, (1, 2, 7, 16, 17, 33, 64, 200))


@pytest.mark.gpu
def test_captured_and_beyond_two_gigabytes() -> None:
    from espalier.kernels.linear.dense import dense_linear, pack_dense

    weight = torch.zeros(248_320, 9216, dtype=torch.bfloat16, device="cuda")  # more than 2^31 numbers
    weight[-128:] = torch.randn(128, 9216, device="cuda")
    group, x, out = (
        pack_dense([weight], [None]),
        torch.randn(3, 9216, device="cuda"),
        poisoned(3, 248_320, device="cuda"),
    )
    assert group.weight is weight
    (got,) = captured(functools.partial(dense_linear, x, group, out), [out])
    want = x.double() @ weight[-128:].double().T
    assert ((got[:, -128:].double() - want).abs() <= 1e-4 * want.abs().max()).all() and not got[:, :-128].any()
