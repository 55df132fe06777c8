"""Dependent launches of the kernels before a linear: their machine code keeps the contract. `test_linear_rows.py` looks at the linears'."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from espalier.kernels import dependent_launch
from espalier.kernels.activation import silu_mul_rotate
from espalier.kernels.device import DeviceClass
from espalier.kernels.hadamard import rotate
from espalier.kernels.norm import add_norm_rotate
from tests.support.sass import READS, RELEASE, WAIT, WRITES, MachineCode, compile_kernel

ROTATE = {"MEMBERS": 2, "ROWS": 1, "BLOCKS": 8}
NORM = {
    "WIDTH": 5120,
    "MEMBERS": 2,
    "HAS_Y": True,
    "HAS_NORMED": True,
    "UNIT_OFFSET": False,
}
TREE = dict(zip(("HIGH", "LEVELS", "ODD_LEVELS"), add_norm_rotate.row_levels(5120), strict=True))
POINTERS = {
    **dict.fromkeys(("x_ptr", "suh_ptr", "out_ptr", "gate_up_ptr", "y_ptr", "weight_ptr", "rotated_ptr"), "*fp16"),
    **dict.fromkeys(("residual_ptr", "sum_ptr", "normed_ptr"), "*fp32"),
    "eps": "fp32",
}
KERNELS: dict[str, tuple[Any, Mapping[str, Any], int]] = {
    "rotate": (rotate._rotate_input_kernel, ROTATE, rotate.WARPS),
    "add-norm-rotate": (add_norm_rotate._add_norm_rotate_kernel, NORM | TREE | {"TILES": 1, "BLOCKS": 8}, 8),
    "add-norm-rotate-whole-rows": (
        add_norm_rotate._add_norm_rotate_kernel,
        NORM | TREE | {"TILES": 3, "BLOCKS": 16},
        8,
    ),
    "silu-mul-rotate": (silu_mul_rotate._silu_mul_rotate_kernel, {"ROWS": 1, "BLOCKS": 8, "COMPILED": True}, 4),
    "silu-mul-rotate-of-rows": (silu_mul_rotate._silu_mul_rotate_kernel, {"ROWS": 4, "BLOCKS": 8, "COMPILED": True}, 4),
}


def compile_first(name: str, capability: int, early: bool) -> MachineCode:
    kernel, constants, warps = KERNELS[name]
    types = {arg: POINTERS.get(arg, "i32") for arg in kernel.arg_names if not arg.isupper()}
    return compile_kernel(kernel, types, {**constants, "EARLY": early}, capability, warps, enable_fp_fusion=False)


@pytest.mark.parametrize("capability", [90, 120])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_before_a_linear_touch_nothing_and_release_nobody_before_the_wait(name: str, capability: int) -> None:
    before = compile_first(name, capability, early=True).before_wait()
    assert not [opcode for opcode in before if opcode.startswith((*READS, *WRITES, RELEASE, "EXIT"))]


@pytest.mark.parametrize("name", KERNELS)
def test_older_cards_have_no_such_instructions(name: str) -> None:
    opcodes = [opcode for _, opcode, _ in compile_first(name, 80, early=False).instructions]
    assert opcodes and not [opcode for opcode in opcodes if opcode.startswith((WAIT, RELEASE))]


@pytest.mark.parametrize(
    ("device", "early"),
    [
        (DeviceClass(), False),
        (DeviceClass(triton=True), False),
        (DeviceClass((8, 9), 128, 101376, triton=True, gluon=True), False),
        (DeviceClass((9, 0), 132, 232448, triton=True), False),
        (DeviceClass((9, 0), 132, 232448, triton=True, gluon=True), True),
        (DeviceClass((12, 0), 188, 101376, triton=True, gluon=True), True),
    ],
    ids=["cpu", "interpreter", "sm89", "untested-triton", "sm90", "sm120"],
)
def test_who_launches_early(device: DeviceClass, early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependent_launch, "device_class", lambda _: device)
    wanted = {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
    assert dependent_launch.early_launch(torch.device("cpu")) == wanted
