"""Machine code of the fast attention kernels, compiled without a GPU: matrix instructions, wide copies, and (almost) nothing spilled."""

import pytest

pytest.importorskip("triton")
from tests.support.sass import MachineCode, compile_kernel

POINTERS = {
    "q": "*fp16",
    "keys": "*fp16",
    "values": "*fp16",
    "out": "*fp16",
    "partials": "*fp32",
    "maxima": "*fp32",
    **dict.fromkeys(("first_row", "num_rows", "start", "tables", "shares"), "*i32"),
}
FEW_BYTES = 40  # of stack: numbers used once a split or less


def types_of(arguments: list[str], **others: str) -> dict[str, str]:
    """Pointers, integers, and `factor`; what is in capitals is no argument."""
    known = {**POINTERS, "factor": "fp32", **others}
    return {name: known.get(name, "i32") for name in arguments if not name.isupper()}


def compile_decode(capability: int, *, shared: bool = False) -> MachineCode:
    from espalier.kernels.attention import decode

    constants = {
        "GROUP": 4,
        "KV_HEADS": 8,
        "HEAD_DIM": 128,
        "BLOCK": 16,
        "M": 16,
        "S": decode.BUFFERS,
        "SHARED": shared,
    }
    types = types_of(decode.attend_split.arg_names)
    return compile_kernel(decode.attend_split, types, constants, capability, 4, maxnreg=168, enable_fp_fusion=False)


def check_decode(code: MachineCode) -> None:
    assert code.registers <= 168 and code.stack <= FEW_BYTES
    opcodes = [opcode for _, opcode, _ in code.instructions]
    if opcodes:
        # 16 rows by 256 keys by 128, twice, and the totals; four warps.
        assert sum(opcode.startswith("HMMA.16816.F32") for opcode in opcodes) == 2 * 64 + 16
        copies = [opcode for opcode in opcodes if opcode.startswith("LDGSTS")]
        assert copies and all(".128" in opcode for opcode in copies)


def test_decode_on_hopper() -> None:
    check_decode(compile_decode(90))
    check_decode(compile_decode(90, shared=True))


@pytest.mark.sweep
@pytest.mark.parametrize("capability", [80, 86, 89, 120, 121])
def test_decode_elsewhere(capability: int) -> None:
    check_decode(compile_decode(capability))
    check_decode(compile_decode(capability, shared=True))


def compile_prefill(group: int = 4, head_dim: int = 128) -> MachineCode:
    from espalier.kernels.attention import prefill

    constants = {"GROUP": group, "KV_HEADS": 8, "HEAD_DIM": head_dim, "BLOCK": 16, "S": prefill.UNITS}
    box = f"tensordesc<fp16[16, 64],{prefill.BOX.value!r}>"
    types = types_of(prefill.attend_chunk.arg_names, kd=box, vd=box, tiles="*i32")
    return compile_kernel(prefill.attend_chunk, types, constants, 90, 4, enable_fp_fusion=False)


@pytest.mark.sweep
@pytest.mark.parametrize(("group", "head_dim"), [(5, 128), (7, 128), (1, 64), (5, 192), (4, 256)])
def test_prompts_of_other_heads(group: int, head_dim: int) -> None:
    assert not compile_prefill(group, head_dim).overwritten_operands()


def test_prompts_on_hopper() -> None:
    code = compile_prefill()
    assert code.stack <= FEW_BYTES
    products = [opcode for _, opcode, _ in code.instructions if opcode.startswith("HGMMA")]
    # Two warpgroups: scores, weighted values, totals.
    assert sum("64x128x16" in opcode for opcode in products) == 2 * 16
    assert sum("64x8x16" in opcode for opcode in products) == 2 * 8
    assert not code.overwritten_operands()
