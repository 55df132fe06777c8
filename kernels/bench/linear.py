"""Rows of the EXL3 linear: the peer's shapes, rates and row counts, then every other rate, then rows about the border of Hopper's prompt forms.

Rotations are part of every call of ours.
"""

import dataclasses
import functools

import torch

from espalier.kernels.bench.registry import CUBLAS, OURS, BenchCase, Call, Inputs, Label, Workload, copies_past_l2
from espalier.kernels.device import device_class
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import RATES
from espalier.kernels.linear.dispatch import Form, choose_form, load_form, possible_forms
from espalier.kernels.linear.exl3_linear import allocate_rotated, exl3_linear, linear_rotated, scratch_size
from espalier.kernels.linear.group import LinearGroup, Run

SHAPES = ((5120, 17408), (17408, 5120), (5120, 12288), (6144, 5120))
HEAD = (5120, 248320)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
PORTABLE = "portable"  # the form for any GPU from sm_80 on
_OTHER_RATE_ROWS = (1, 8, 64, 2048)
_POWER_BOUND_ROWS = 256
# Hopper's forms for prompts, by the name of their call where dispatch takes the other one.
_PROMPT_FORMS = {"in registers": Form.PROMPT_WGMMA, "decoded": Form.PROMPT_DECODED}
_PROMPT_ROWS = 512
_BORDER_ROWS = (1024, 1536)


def cases() -> list[BenchCase]:
    """Peer's rows first."""
    layers = [
        (shape, rate, codebook) for shape in SHAPES for rate in (4.0, 3.0) for codebook in (Codebook.MUL1, Codebook.MCG)
    ]
    layers += [(HEAD, 6.0, Codebook.MUL1)]
    found = [
        _case(shape, rate, codebook, rows)
        for shape, rate, codebook in layers
        for rows in ROWS
        if rows <= 128 or codebook is Codebook.MUL1
    ]
    others = [rate for rate in RATES if rate not in (3.0, 4.0)]
    found += [_case(SHAPES[0], rate, Codebook.MUL1, rows) for rate in others for rows in _OTHER_RATE_ROWS]
    return found + [_case(shape, 4.0, Codebook.MUL1, rows) for shape in SHAPES for rows in _BORDER_ROWS]


def _case(shape: tuple[int, int], rate: float, codebook: Codebook, rows: int) -> BenchCase:
    layer = (*shape, rate, codebook)
    labels: dict[str, Label] = {"in": shape[0], "out": shape[1], "rate": rate, "codebook": str(codebook), "rows": rows}
    return BenchCase("linear", labels, functools.partial(_linear, *layer, rows), shares=layer)


def random_group(
    inputs: Inputs, in_features: int, widths: tuple[int, ...], rate: float, codebook: Codebook
) -> LinearGroup:
    """Linears of random bits: any bits are a valid trellis."""
    out_features = sum(widths)
    shape = (in_features // 64, out_features // 16, int(32 * rate))
    words = inputs.randint(-(1 << 31), 1 << 31, *shape, dtype=torch.int32)
    svh = (inputs.randn(out_features) * in_features**-0.5).half()
    run = Run(0, out_features, rate, codebook, words)
    return LinearGroup(in_features, widths, (run,), inputs.randn(len(widths), in_features), svh, None)


def _linear(
    in_features: int, out_features: int, rate: float, codebook: Codebook, rows: int, inputs: Inputs
) -> Workload:
    from espalier.kernels.hadamard.rotate import rotate_input

    packed = int(in_features * out_features * rate / 8)
    copies = copies_past_l2(packed)
    groups = inputs.once(
        "groups",
        lambda: [random_group(inputs, in_features, (out_features,), rate, codebook) for _ in range(copies)],
    )
    dense_copies = copies_past_l2(2 * in_features * out_features)
    dense = inputs.once("dense", lambda: [inputs.randn(in_features, out_features) for _ in range(dense_copies)])
    x, out = inputs.randn(rows, in_features), inputs.empty(rows, out_features)
    rotated = allocate_rotated(groups[0], rows)
    device = device_class(inputs.device)
    # As a card without wgmma would dispatch.
    form = choose_form(dataclasses.replace(device, capability=(8, 0)), rows, out_features)
    forms = {PORTABLE: form}
    chosen = choose_form(device, rows, out_features)
    if rows >= _PROMPT_ROWS:
        possible = set(possible_forms(device)) - {chosen}
        forms |= {name: other for name, other in _PROMPT_FORMS.items() if other in possible}
    size = scratch_size(groups[0], rows)
    for other in forms.values():
        size |= load_form(other).scratch_size(in_features, (out_features,), rows)
    scratch = inputs.scratch(size)

    def in_form(form: Form, i: int) -> None:
        x_rot = rotated.view(1, rows, in_features)
        rotate_input(x, groups[i].suh, out=x_rot)
        linear_rotated(x_rot, groups[i], scratch, out, form)

    return Workload(
        {
            OURS: Call(lambda i: exl3_linear(x, groups[i], scratch, out=out, rotated=rotated), copies),
            **{name: Call(functools.partial(in_form, form), copies) for name, form in forms.items()},
            CUBLAS: Call(lambda i: torch.mm(x, dense[i], out=out), dense_copies),
        },
        num_bytes=packed,
        flops=2 * rows * in_features * out_features,
        power_bound=rows >= _POWER_BOUND_ROWS,
    )
