"""The row forms on the GPU: the bits of their output, however the launch is cut, from the partial sums that they leave in scratch."""

import dataclasses
import functools
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from espalier.kernels.counters import Scratch, ScratchSize
from espalier.kernels.device import device_class
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import RATES
from espalier.kernels.exl3.reference import decode_inner
from espalier.kernels.linear import reference
from espalier.kernels.linear.dispatch import Form, choose_form, load_form, possible_forms
from espalier.kernels.linear.exl3_linear import allocate_scratch
from espalier.kernels.linear.group import LinearGroup, pack_group
from espalier.kernels.linear.rows_launch import (
    BLOCK,
    RowsShape,
    mma_shape,
    scratch_for,
    wgmma_shape,
)
from espalier.kernels.linear.splits import num_splits
from tests.support.linears import check_captured, move, random_linear

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 3, 8, 9, 16, 17, 32, 33, 64, 65, 128)
MOST = max(ROWS)
# Members of (width, rate, codebook).
ONE = ((256, 4.0, Codebook.MUL1),)
MIXED = ((256, 4.0, Codebook.MUL1), (128, 3.0, Codebook.MCG), (128, 3.0, Codebook.MCG), (256, 3.5, Codebook.MUL1))
Members = tuple[tuple[int, float, Codebook], ...]


@functools.cache
def group_of(width: int, members: Members, with_bias: bool = False) -> LinearGroup:
    linears = [
        move(random_linear(width, out, rate, codebook, i), "cuda") for i, (out, rate, codebook) in enumerate(members)
    ]
    draw = torch.Generator().manual_seed(3)
    biases = [
        torch.randn(out, generator=draw).cuda() if with_bias and i != 1 else None
        for i, (out, _, _) in enumerate(members)
    ]
    return pack_group(linears, biases)


@functools.cache
def rotated(width: int, members: int, rows: int = MOST) -> Tensor:
    return torch.randn(members, rows, width, generator=torch.Generator().manual_seed(width)).half().cuda()


def shapes(width: int) -> Iterable[tuple[str, RowsShape]]:
    """Every way to cut a launch that some call of some device takes, and more."""
    for rows in (8, 16, 32, 64):
        yield "rows_mma", mma_shape(width, rows)
    yield "rows_mma", dataclasses.replace(mma_shape(width, 8), stages=3, whole=False, spare=2)
    yield "rows_mma", dataclasses.replace(mma_shape(width, 32), warps=8, finish_tokens=32, span=2)
    if device_class(torch.device("cuda")).capability == (9, 0):
        for rows in (32, 64, 128):
            yield "rows_wgmma", dataclasses.replace(wgmma_shape(width, width // 2, rows), span=16, spare=1)


def finishes(width: int) -> Iterable[tuple[str, RowsShape]]:
    """Other ways to share the finishing of a block."""
    if device_class(torch.device("cuda")).capability == (9, 0):
        for rows in (32, 64, 128):
            shape = wgmma_shape(width, width // 2, rows)
            yield "rows_wgmma", dataclasses.replace(shape, helpers=1)
            yield "rows_wgmma", dataclasses.replace(shape, finish_tokens=8, helpers=rows // 16)


def run(form: str, x: Tensor, group: LinearGroup, shape: RowsShape, dtype: torch.dtype) -> tuple[Tensor, Scratch]:
    from espalier.kernels.linear import rows_mma

    rows = x.shape[1]
    scratch = allocate_scratch(scratch_for(group.in_features, group.out_features, rows, shape), x.device)
    scratch.partials.fill_(torch.nan)
    out = torch.full((rows, group.out_features), torch.nan, dtype=dtype, device="cuda")
    if form == "rows_mma":
        rows_mma.launch_as(x.contiguous(), group, out, scratch, shape)
    else:
        from espalier.kernels.linear import rows_wgmma

        rows_wgmma.launch_as(x.contiguous(), group, out, scratch, shape)
    assert not scratch.counters.any()
    return out, scratch


def partial_sums(scratch: Scratch, rows: int, group: LinearGroup, shape: RowsShape) -> Tensor:
    """fp32 [splits, rows, out] from where the programs left them: a thread's accumulators in groups of four."""
    tile, splits = shape.token_tile, num_splits(group.in_features)
    size = scratch_for(group.in_features, group.out_features, rows, shape).partials
    # tile of tokens, block of columns, split, half; group of tokens, warp, lane's column and tokens, column + 8, next token
    axes = scratch.partials[:size].view(-1, group.out_features // BLOCK, splits, 2, tile // 8, 4, 8, 4, 2, 2)
    return axes.permute(2, 0, 4, 7, 9, 1, 3, 5, 8, 6).reshape(splits, -1, group.out_features)[:, :rows]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
def test_the_output_is_the_reference_of_the_partial_sums(dtype: torch.dtype, with_bias: bool) -> None:
    group, x = group_of(640, MIXED, with_bias), rotated(640, len(MIXED))
    for form, shape in (*shapes(640), *finishes(640)):
        for rows in (3, 70):
            out, scratch = run(form, x[:, :rows], group, shape, dtype)
            total = reference.add_in_order(partial_sums(scratch, rows, group, shape))
            assert torch.equal(out, reference.rotate_back(total, group.svh, group.bias, dtype)), (form, shape, rows)


@pytest.mark.parametrize("width", [128, 640, 896, 4224, 17408])
def test_bits_do_not_depend_on_the_cut_or_the_rows(width: int) -> None:
    group, x = group_of(width, ONE), rotated(width, 1)
    whole, _ = run("rows_mma", x, group, mma_shape(width, 8), torch.float32)
    for form, shape in (*shapes(width), *finishes(width)):
        for rows in ROWS:
            out, _ = run(form, x[:, :rows], group, shape, torch.float32)
            assert torch.equal(out, whole[:rows]), (form, shape, rows)
        places = torch.tensor([77, 3, 127, 3], device="cuda")
        assert torch.equal(run(form, x[:, places], group, shape, torch.float32)[0], whole[places]), (form, shape)


@pytest.mark.parametrize("codebook", Codebook)
@pytest.mark.parametrize("rate", RATES)
def test_every_rate_and_codebook(rate: float, codebook: Codebook) -> None:
    if rate != int(rate) and not codebook.allows_half_rates:
        return
    linear = move(random_linear(896, 128, rate, codebook), "cpu")
    group, x = group_of(896, ((128, rate, codebook),)), rotated(896, 1, 20)
    exact = x[0].double() @ decode_inner(linear).cuda().double()
    base = None
    for form, shape in shapes(896):
        out, scratch = run(form, x, group, shape, torch.float32)
        base = out if base is None else base
        assert torch.equal(out, base), (form, shape)
        error = (partial_sums(scratch, 20, group, shape).double().sum(0) - exact).norm() / exact.norm()
        assert error < 1e-6, (form, shape, error)


def test_members_equal_themselves_alone() -> None:
    group, x = group_of(4224, MIXED, True), rotated(4224, len(MIXED))
    column = 0
    whole, _ = run("rows_mma", x[:, :5], group, mma_shape(4224, 5), torch.float16)
    for i, member in enumerate(MIXED):
        linear = move(random_linear(4224, *member, i), "cuda")
        bias = None if group.bias is None else group.bias[column : column + member[0]]
        alone, _ = run("rows_mma", x[i : i + 1, :5], pack_group([linear], [bias]), mma_shape(4224, 5), torch.float16)
        assert torch.equal(alone, whole[:, column : column + member[0]]), i
        column += member[0]


@pytest.mark.parametrize("form", [Form.ROWS_MMA, Form.ROWS_WGMMA])
@pytest.mark.parametrize("rows", [1, 40])
def test_captured_equals_eager_and_allocates_nothing(form: Form, rows: int) -> None:
    if form not in possible_forms(device_class(torch.device("cuda"))):
        pytest.skip(f"{form} does not run on this device")
    group, x = group_of(1024, MIXED), rotated(1024, len(MIXED))[:, :rows].contiguous()
    check_captured(form, x, group)


def test_two_streams_at_once() -> None:
    from espalier.kernels.linear import rows_mma

    group = group_of(4224, ONE)
    inputs = [rotated(4224, 1)[:, :rows].contiguous() for rows in (3, 40)]
    size = scratch_for(4224, group.out_features, 40, mma_shape(4224, 40)) | ScratchSize()
    scratches = [allocate_scratch(size, x.device) for x in inputs]
    solo = [x.new_empty((x.shape[1], group.out_features), dtype=torch.float32) for x in inputs]
    for x, out, scratch in zip(inputs, solo, scratches, strict=True):
        rows_mma.launch(x, group, out, scratch)
    many = [torch.full((1000, *out.shape), torch.nan, device="cuda") for out in solo]
    streams = [torch.cuda.Stream() for _ in inputs]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for call in range(1000):
        for x, out, scratch, stream in zip(inputs, many, scratches, streams, strict=True):
            with torch.cuda.stream(stream):
                rows_mma.launch(x, group, out[call], scratch)
    torch.cuda.synchronize()
    for out, alone, scratch in zip(many, solo, scratches, strict=True):
        assert torch.equal(out, alone.expand_as(out))
        assert not scratch.counters.any()


@pytest.mark.parametrize("rows", [24, 64])
def test_streams_that_fill_the_device_do_not_wait_for_each_other_for_ever(rows: int) -> None:
    """Programs that help to finish a block wait for others of their launch; here four launches at once have more programs than fit."""
    group, x = group_of(4224, ((8192, 4.0, Codebook.MUL1),)), rotated(4224, 1)[:, :rows].contiguous()
    form = load_form(choose_form(device_class(x.device), rows, 8192))
    alone, _ = run("rows_mma", x, group, mma_shape(4224, rows), torch.float16)
    size = form.scratch_size(4224, (8192,), rows)
    lanes = [
        (torch.cuda.Stream(), allocate_scratch(size, x.device), torch.full_like(alone, torch.nan))  # type: ignore[no-untyped-call]
        for _ in range(4)
    ]
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, scratch, out in lanes:
            with torch.cuda.stream(stream):
                out.fill_(torch.nan)
                form.launch(x, group, out, scratch)
        torch.cuda.synchronize()
        assert all(torch.equal(out, alone) for _, _, out in lanes)
    assert not any(scratch.counters.any() for _, scratch, _ in lanes)
