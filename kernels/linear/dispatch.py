"""Which form of the EXL3 linear runs: a pure function of what the device is and of the shape, never of values. All forms give the same bits.

Knows no kernel: the files of the forms are imported when a form is first asked for, so that an unknown Triton, or a broken Gluon, costs one
warning and a slower form. Where the thresholds come from: benchmarks/notes/exl3-linear.md.
"""

import enum
import functools
import importlib
import warnings
from types import ModuleType

from espalier.kernels.device import DeviceClass
from espalier.kernels.linear.rows_launch import HOPPER


class Form(enum.StrEnum):
    """Each is a module of this folder with `launch` and `scratch_size`."""

    PLAIN = "plain"  # plain Triton: any GPU, and the interpreter
    ROWS_MMA = "rows_mma"  # Gluon, mma.sync: a few rows
    ROWS_WGMMA = "rows_wgmma"  # Gluon, wgmma (Hopper): up to a block of 128 rows
    PROMPT_MMA = "prompt_mma"  # Gluon, mma.sync: many rows
    PROMPT_WGMMA = "prompt_wgmma"  # Gluon, wgmma (Hopper): many rows
    PROMPT_DECODED = "prompt_decoded"  # Gluon, wgmma (Hopper): so many rows that weights are decoded once, into scratch


# The last row count that is not worth decoded weights: at 1,536 rows they win by 2% to 17%, at 1,024 a relative of the form lost in three of four
# shapes by 10% to 17% (benchmarks/notes/exl3-linear-prompts.md).
_LAST_IN_REGISTERS = 1535
# (rows up to and with which it is the fastest, form); the form for the most rows serves the rest.
_PORTABLE = ((128, Form.ROWS_MMA),)
_ON_HOPPER = ((16, Form.ROWS_MMA), (128, Form.ROWS_WGMMA), (_LAST_IN_REGISTERS, Form.PROMPT_WGMMA))
# From so many output columns on, 128 rows already fill the SMs with prompt tiles.
_WIDE = 16384
# From so many on, a head's, 64 rows fill any card with prompt tiles, whose sums never leave their SM.
_HEAD = 65536
_PORTABLE_HEAD = ((32, Form.ROWS_MMA),)
_ON_HOPPER_WIDE = ((16, Form.ROWS_MMA), (64, Form.ROWS_WGMMA), (_LAST_IN_REGISTERS, Form.PROMPT_WGMMA))


def thresholds(device: DeviceClass, out_features: int) -> tuple[tuple[int, Form], ...]:
    """(last row count, form) of every form but the one for the most rows, ascending."""
    if not device.gluon:
        return ()
    if device.capability != HOPPER:
        return _PORTABLE_HEAD if out_features >= _HEAD else _PORTABLE
    return _ON_HOPPER_WIDE if out_features >= _WIDE else _ON_HOPPER


def choose_form(device: DeviceClass, rows: int, out_features: int) -> Form:
    """The fastest form for `rows` rows of a group `out_features` wide."""
    for last, form in thresholds(device, out_features):
        if rows <= last:
            return form
    if not device.gluon:
        return Form.PLAIN
    return Form.PROMPT_DECODED if device.capability == HOPPER else Form.PROMPT_MMA


def possible_forms(device: DeviceClass) -> tuple[Form, ...]:
    """Every form that this device can run, the fastest or not."""
    if not device.gluon:
        return (Form.PLAIN,) if device.triton else ()
    portable = (Form.PLAIN, Form.ROWS_MMA, Form.PROMPT_MMA)
    if device.capability != HOPPER:
        return portable
    return (*portable, Form.ROWS_WGMMA, Form.PROMPT_WGMMA, Form.PROMPT_DECODED)


def load_form(form: Form) -> ModuleType:
    """The module of a form."""
    return load_kernels(form, Form.PLAIN)


@functools.cache
def load_kernels(name: str, plain: str) -> ModuleType:
    """A module of this folder. One that cannot be imported is replaced by `plain`, with one warning."""
    try:
        return importlib.import_module(f"espalier.kernels.linear.{name}")
    except Exception as error:  # whatever a changed Gluon raises while a kernel is defined
        if name == plain:
            raise
        warnings.warn(f"{name} cannot be loaded ({error!r}); {plain} runs instead, slower", stacklevel=2)
        return load_kernels(plain, plain)
