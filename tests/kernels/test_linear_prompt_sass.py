"""Machine code of the prompt forms of the EXL3 linear: no spills on any card they are for, and products that overlap."""

import pytest

from tests.support.linears import POINTERS
from tests.support.sass import compile_kernel, needs_triton


@needs_triton
@pytest.mark.parametrize(
    ("tokens", "rate2"),
    [
        (128, 7),
        (256, 12),
        *(pytest.param(256, rate2, marks=pytest.mark.sweep) for rate2 in (2, 3, 4, 5, 6, 7, 8, 10, 14, 16)),
    ],
)
def test_hopper_form_overlaps_and_does_not_spill(tokens: int, rate2: int) -> None:
    from triton.experimental.gluon import language as gl

    from espalier.kernels.linear import prompt_wgmma

    box = f"tensordesc<fp16[{tokens}, 64],{gl.NVMMASharedLayout(128, 16, 2)!r}>"
    constants = {
        "ENDS": (8, 16),
        "NB": 16,
        "BT": tokens,
        "STAGES": prompt_wgmma.STAGES[tokens],
        "SPLITS": 8,
        "RATE2": rate2,
    }
    code = compile_kernel(
        prompt_wgmma.prompt_wgmma,
        {"x": box} | POINTERS | dict.fromkeys(("T", "out_stride", "blocks", "whole", "dealers"), "i32"),
        constants | {"CODEBOOK": 2},
        capability=90,
        num_warps=prompt_wgmma.NUM_WARPS,
        enable_fp_fusion=False,
    )
    assert code.stack == 0
    opcodes = [opcode for _, opcode, _ in code.instructions]
    products = sum(opcode.startswith("HGMMA") for opcode in opcodes)
    # Where the assembler cannot prove accumulators safe it waits for every single product, and nothing overlaps.
    assert 0 < opcodes.count("WARPGROUP.DEPBAR.LE") <= products // 2
    assert not code.overwritten_operands()


@needs_triton
@pytest.mark.parametrize("out", ["*fp16", "*fp32"])
def test_form_on_decoded_weights_overlaps_and_does_not_spill(out: str) -> None:
    from triton.experimental.gluon import language as gl

    from espalier.kernels.linear import prompt_decoded

    layout = gl.NVMMASharedLayout(128, 16, 2)
    boxes = {name: f"tensordesc<fp16[{rows}, 64],{layout!r}>" for name, rows in (("x", 64), ("weights", 128))}
    pointers = {"svh": "*fp16", "bias": "*fp32", "out": out}
    integers = ("T", "tokens", "out_stride", "blocks", "first_block", "NB")
    code = compile_kernel(
        prompt_decoded.prompt_decoded,
        boxes | pointers | dict.fromkeys(integers, "i32"),
        {"ENDS": (8, 16), "STAGES": prompt_decoded.STAGES, "SPLITS": 8},
        capability=90,
        num_warps=prompt_decoded.NUM_WARPS,
        enable_fp_fusion=False,
    )
    assert code.stack == 0
    opcodes = [opcode for _, opcode, _ in code.instructions]
    # Three consumers, each with four products in its loop; a wait in the loop and one behind it.
    assert sum(opcode.startswith("HGMMA") for opcode in opcodes) == 12
    assert opcodes.count("WARPGROUP.DEPBAR.LE") == 6
    assert not code.overwritten_operands()


@needs_triton
@pytest.mark.parametrize(
    "rate2", [8, *(pytest.param(rate2, marks=pytest.mark.sweep) for rate2 in (2, 3, 4, 5, 6, 7, 10, 12, 14, 16))]
)
def test_decoding_does_not_spill_and_stores_wide(rate2: int) -> None:
    from espalier.kernels.linear import decode_weights

    code = compile_kernel(
        decode_weights.decode_weights,
        {"words": "*i32", "weights": "*fp16", "first_block": "i32", "blocks": "i32"},
        {"ROW": 5120 * rate2, "STEPS": 2, "RATE2": rate2, "CODEBOOK": 2},
        capability=90,
        num_warps=decode_weights.NUM_WARPS,
    )
    assert code.stack == 0
    stores = [opcode for _, opcode, _ in code.instructions if opcode.startswith("STG")]
    assert stores and all(opcode == "STG.E.128" for opcode in stores)


@needs_triton
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 120, 121])
def test_portable_form_does_not_spill(capability: int) -> None:
    from espalier.kernels.linear import prompt_mma

    limit = {80: 166912, 90: 232448}.get(capability, 101376)
    shape = prompt_mma.choose_shape(limit)
    assert 2 * (shape.shared_memory + 1024) <= limit + 1024, "two programs must fit an SM"
    code = compile_kernel(
        prompt_mma.prompt_mma,
        {
            "x": "*fp16",
            "words": "*i32",
            "svh": "*fp16",
            "bias": "*fp32",
            "out": "*fp16",
            "T": "i32",
            "out_stride": "i32",
            "blocks": "i32",
        },
        {"ENDS": (8, 16), "NB": 16, "BT": shape.tokens, "STAGES": shape.stages, "SPLITS": 8, "RATE2": 6, "CODEBOOK": 2},
        capability=capability,
        num_warps=prompt_mma.NUM_WARPS,
        enable_fp_fusion=False,
    )
    assert code.stack == 0
