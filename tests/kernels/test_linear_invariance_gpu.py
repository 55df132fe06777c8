"""One arithmetic on the GPU: a row's bits are the same in every form, at every row count and place, eager or captured, on any stream.

Few shapes, because each one is compiled for each form. Everything is compared to the plain form, which `test_linear_plain.py` holds to the
definition, and whose rotations are bit for bit the reference's.
"""

import functools

import pytest
import torch
from torch import Tensor

from espalier.kernels.device import device_class
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import Exl3Tensors
from espalier.kernels.exl3.reference import decode_inner
from espalier.kernels.linear import reference
from espalier.kernels.linear.dispatch import Form, load_form, possible_forms, thresholds
from espalier.kernels.linear.exl3_linear import allocate_scratch, exl3_linear, linear_rotated
from espalier.kernels.linear.group import LinearGroup, pack_group
from tests.support.linears import move, random_linear, run_form, workspace

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 8, 16, 17, 64, 127, 128, 129, 256, 1000, 2048, 8192)
NARROW = (4224, 512)  # eight uneven splits
WIDE = (640, 16384)  # two uneven splits; where prompts start at fewer rows
FEW_ROWS_FORMS = (Form.ROWS_MMA, Form.ROWS_WGMMA)


def forms() -> tuple[Form, ...]:
    return possible_forms(device_class(torch.device("cuda")))


@functools.cache
def group_of(shape: tuple[int, int], rate: float = 4.0, codebook: Codebook = Codebook.MUL1) -> LinearGroup:
    bias = torch.randn(shape[1], generator=torch.Generator().manual_seed(5))
    return pack_group([move(random_linear(*shape, rate, codebook), "cuda")], [bias.cuda()])


@functools.cache
def inputs(width: int, rows: int = 8192) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(width)).half().cuda()


def call(x: Tensor, group: LinearGroup, dtype: torch.dtype = torch.float32) -> Tensor:
    """The public API with memory of its own."""
    out = torch.full((x.shape[0], group.out_features), torch.nan, dtype=dtype, device="cuda")
    return exl3_linear(x, group, out=out, **workspace(group, x.shape[0]))


def equal(got: Tensor, want: Tensor) -> bool:
    """Bit for bit: NaN is no NaN of another kind, and zeros have signs."""
    return torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("shape", [NARROW, WIDE], ids=lambda shape: "{}x{}".format(*shape))
def test_the_api_at_every_row_count_and_threshold(shape: tuple[int, int]) -> None:
    group, x = group_of(shape), inputs(shape[0])
    borders = [last for last, _ in thresholds(device_class(x.device), shape[1])]
    counts = sorted({*(ROWS if shape == NARROW else ()), *(last + step for last in borders for step in (-1, 0, 1))})
    rows = 8192 if shape == NARROW else 1600
    whole = call(x[:rows], group)
    assert not whole.isnan().any()
    for count in counts:
        if count <= rows:
            assert equal(call(x[:count], group), whole[:count]), count
    # The same rows at other places, one of them alone.
    turned = torch.roll(x[:300], 77, 0)
    assert equal(call(turned, group), torch.roll(whole[:300], 77, 0))
    for row in (1, 200, rows - 1):
        assert equal(call(x[row : row + 1], group), whole[row : row + 1]), row


@pytest.mark.parametrize("form", [form for form in Form if form is not Form.PLAIN])
def test_every_form_equals_the_plain_one(form: Form) -> None:
    if form not in forms():
        pytest.skip(f"{form} does not run on this device")
    group, x = group_of(NARROW), inputs(NARROW[0])
    most = 300 if form in FEW_ROWS_FORMS else 2048
    want = run_form(Form.PLAIN, x[:most], group, torch.float32)
    for rows in (1, 2, 8, 9, 16, 17, 33, 64, 65, 127, 128, 129, 256, 300, 1000, 2048):
        if rows <= most:
            assert equal(run_form(form, x[:rows], group, torch.float32), want[:rows]), rows


@pytest.mark.parametrize("width", [896, 3072])
def test_forms_agree_at_odd_widths(width: int) -> None:
    """And the plain form's two kinds of tensor core instruction: its blocks of 16 rows and of 128."""
    group, x = group_of((width, 256), 3.0, Codebook.MCG), inputs(width, 200)
    want = run_form(Form.PLAIN, x, group, torch.float32)
    assert equal(run_form(Form.PLAIN, x[:3], group, torch.float32), want[:3])
    for form in forms():
        assert equal(run_form(form, x, group, torch.float32), want), form


def test_the_definition_bit_for_bit() -> None:
    """Inputs of -1, 0 and 1, few of them: sums of mcg weights, multiples of 2^-13, are exact then, and nothing else may round otherwise."""
    draw = torch.Generator().manual_seed(1)
    x_rot = torch.randint(-1, 2, (200, 640), generator=draw) * (torch.rand(200, 640, generator=draw) < 0.1)
    case, group = random_linear(640, 256, 3.0, Codebook.MCG), group_of((640, 256), 3.0, Codebook.MCG)
    assert group.bias is not None
    total = reference.add_in_order(reference.partial_sums(x_rot.half(), decode_inner(case)))
    want = reference.rotate_back(total, case.svh, group.bias.cpu(), torch.float16)
    for form in forms():
        scratch = allocate_scratch(load_form(form).scratch_size(640, (256,), 200), torch.device("cuda"))
        out = torch.full((200, 256), torch.nan, dtype=torch.float16, device="cuda")
        linear_rotated(x_rot[None].half().cuda(), group, scratch, out, form)
        assert equal(out.cpu(), want), form


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=lambda dtype: f"{dtype}"[6:])
def test_dtypes(dtype: torch.dtype) -> None:
    """Inputs of this dtype and of fp32; outputs of this dtype are the fp32 ones, rounded once."""
    group = group_of((640, 256), 3.0, Codebook.MCG)
    x = inputs(640, 200).to(dtype)
    full = run_form(Form.PLAIN, x, group, torch.float32)
    for form in forms():
        assert equal(run_form(form, x, group, dtype), full.to(dtype)), form
    if dtype == torch.bfloat16:
        assert equal(call(x.float(), group, dtype), full.to(dtype))


def parts_of(linear: Exl3Tensors, parts: int) -> list[Exl3Tensors]:
    width = linear.out_features // parts
    return [
        Exl3Tensors(
            linear.trellis[:, i * width // 16 : (i + 1) * width // 16],
            linear.suh,
            linear.svh[i * width : (i + 1) * width],
            linear.codebook,
        )
        for i in range(parts)
    ]


@pytest.mark.parametrize("rows", [2, 64, 300])
def test_columns_in_parts_equal_the_whole(rows: int) -> None:
    linear = move(random_linear(*NARROW, 4.0, Codebook.MUL1), "cuda")
    x = inputs(NARROW[0])[:rows]
    whole = call(x, pack_group([linear], [None]))
    for parts in (2, 4):
        pieces = [call(x, pack_group([piece], [None])) for piece in parts_of(linear, parts)]
        assert equal(torch.cat(pieces, 1), whole), parts


def test_a_group_equals_its_members() -> None:
    kinds = [(256, 4.0, Codebook.MUL1), (128, 4.0, Codebook.MUL1), (128, 3.0, Codebook.MCG), (128, 2.5, Codebook.MUL1)]
    linears = [move(random_linear(640, width, *kind, seed), "cuda") for seed, (width, *kind) in enumerate(kinds)]
    biases = [None, torch.randn(128).cuda(), None, None]
    x, group = inputs(640, 300), pack_group(linears, biases)
    members = [pack_group([one], [bias]) for one, bias in zip(linears, biases, strict=True)]
    alone = torch.cat([run_form(Form.PLAIN, x, member, torch.float32) for member in members], 1)
    for form in forms():
        for rows in (2, 300):
            assert equal(run_form(form, x[:rows], group, torch.float32), alone[:rows]), (form, rows)


@pytest.mark.parametrize("rows", [2, 17, 64, 129, 300, 1600])
def test_captured_equals_eager(rows: int) -> None:
    group, x = group_of(NARROW), inputs(NARROW[0])
    eager = call(x[:rows], group, torch.float16)
    held, out = x[300 : 300 + rows].clone(), torch.full_like(eager, torch.nan)
    memory = workspace(group, rows)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        exl3_linear(held, group, out=out, **memory)  # loads what is loaded on first use
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exl3_linear(held, group, out=out, **memory)
    for _ in range(3):
        held.copy_(x[:rows])
        out.fill_(torch.nan)
        graph.replay()
        assert equal(out, eager)
        assert not memory["scratch"].counters.any()


def test_no_call_allocates() -> None:
    group, x = group_of(NARROW), inputs(NARROW[0])
    for rows in (1, 17, 64, 129, 300, 1600):
        memory = workspace(group, rows)
        out = torch.empty(rows, NARROW[1], dtype=torch.float16, device="cuda")
        exl3_linear(x[:rows], group, out=out, **memory)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        exl3_linear(x[:rows], group, out=out, **memory)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, rows


@pytest.mark.parametrize("rows", [2, 64, 300])
def test_two_streams_at_once(rows: int) -> None:
    """The same linear on two streams, each with scratch of its own, again and again."""
    group, x = group_of(NARROW), inputs(NARROW[0])
    solo = [call(x[at : at + rows], group, torch.float16) for at in (0, 500)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    memories = [workspace(group, rows) for _ in range(2)]
    repeats = 1000 if rows == 2 else 100
    outs = [torch.full((repeats, rows, NARROW[1]), torch.nan, dtype=torch.float16, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    for i in range(repeats):
        for at, stream, memory, out in zip((0, 500), streams, memories, outs, strict=True):
            with torch.cuda.stream(stream):
                exl3_linear(x[at : at + rows], group, out=out[i], **memory)
    torch.cuda.synchronize()
    for out, want in zip(outs, solo, strict=True):
        assert equal(out, want.expand_as(out).contiguous())
