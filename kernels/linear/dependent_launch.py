"""Programmatic dependent launch in Gluon: the linears' side of the contract that `kernels/dependent_launch.py` states.

Weights are older than the launch before, so loads of them may be under way before the wait. Device functions.
"""
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def wait_for_inputs():
    """Nothing that an earlier launch writes may be read, nothing it reads written, before this."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_dependents_start():
    """The next launch, if it is a dependent one, may take free places as soon as all programs of this one have begun."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
