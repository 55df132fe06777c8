"""Programmatic dependent launch: a kernel begins while the one before it still runs, and waits for it where it must. Gluon device functions."""
# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

DEPENDENT_LAUNCH = (9, 0)  # compute capability from which on a launch may begin before the one it waits for has ended


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
