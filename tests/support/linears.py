"""EXL3 linears made of random bits, and calls of them with poisoned memory, for tests of products. Kernels load when they are called."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import Exl3Tensors, words_of_rate
from espalier.kernels.linear.dispatch import Form, load_form
from espalier.kernels.linear.exl3_linear import allocate_rotated, allocate_scratch, linear_rotated, scratch_size
from espalier.kernels.linear.group import LinearGroup

if TYPE_CHECKING:
    from espalier.kernels.linear.expert_route import Route

# Triton's names of the types that the forms' pointers have, but for x.
POINTERS = {
    "words": "*i32",
    "svh": "*fp16",
    "bias": "*fp32",
    "out": "*fp16",
    "partials": "*fp32",
    "counters": "*i32",
}


def random_linear(num_in: int, num_out: int, rate: float, codebook: Codebook, seed: int = 0) -> Exl3Tensors:
    """[num_in, num_out] on the CPU: random trellis, scales of both signs, outputs of about the inputs' size."""
    draw = torch.Generator().manual_seed(seed)
    trellis = torch.randint(-32768, 32768, (num_in // 16, num_out // 16, words_of_rate(rate)), generator=draw)
    suh, svh = torch.randn(num_in, generator=draw), torch.randn(num_out, generator=draw)
    return Exl3Tensors(trellis.short(), suh.half(), (svh * num_in**-0.5).half(), codebook)


def move(linear: Exl3Tensors, device: torch.device | str) -> Exl3Tensors:
    """The same linear there."""
    return Exl3Tensors(linear.trellis.to(device), linear.suh.to(device), linear.svh.to(device), linear.codebook)


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want|, in fp64."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def workspace(group: LinearGroup, rows: int) -> dict[str, Any]:
    """`scratch` and `rotated` for `exl3_linear`, poisoned where nothing may be read before it is written."""
    scratch = allocate_scratch(scratch_size(group, rows), group.svh.device)
    scratch.partials.fill_(torch.nan)
    return {"scratch": scratch, "rotated": allocate_rotated(group, rows).fill_(torch.nan)}


def run_form(form: Form, x: Tensor, group: LinearGroup, dtype: torch.dtype) -> Tensor:
    """One form at any row count, whether or not dispatch would choose it: y [rows, out], NaN where it wrote nothing."""
    from espalier.kernels.hadamard.rotate import rotate_input

    rows = x.shape[0]
    module = load_form(form)
    scratch = allocate_scratch(module.scratch_size(group.in_features, group.widths, rows), x.device)
    scratch.partials.fill_(torch.nan)
    x_rot = x.new_full((group.num_members, rows, group.in_features), torch.nan, dtype=torch.float16)
    rotate_input(x, group.suh, out=x_rot)
    out = x.new_full((rows, group.out_features), torch.nan, dtype=dtype)
    linear_rotated(x_rot, group, scratch, out, form)
    assert not scratch.counters.any(), f"{form} left its counters"
    return out


def check_captured(form: Form, x_rot: Tensor, group: LinearGroup) -> None:
    """Two calls in a CUDA graph, replayed again and again: no allocation, the bits of the eager call, counters at 0."""
    module, rows = load_form(form), x_rot.shape[1]
    scratch = allocate_scratch(module.scratch_size(group.in_features, group.widths, rows), x_rot.device)
    out = x_rot.new_full((rows, group.out_features), torch.nan)
    module.launch(x_rot, group, out, scratch)
    eager = out.clone()
    out.fill_(torch.nan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_allocated()
        for _ in range(2):
            module.launch(x_rot, group, out, scratch)
        assert torch.cuda.memory_allocated() == before
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, eager)
    assert not scratch.counters.any()


def check_route(ids: Tensor, found: "Route") -> None:
    """Against a stable sort."""
    flat = ids.flatten().long()
    valid = (flat >= 0) & (flat < found.num_experts)
    order = torch.argsort(torch.where(valid, flat, found.num_experts), stable=True)
    num_valid = int(valid.sum())
    assert found.pair_of[:num_valid].tolist() == order[:num_valid].tolist()
    assert (found.pair_of[num_valid:] == -1).all()
    want = torch.full_like(flat, -1)
    want[order[:num_valid]] = torch.arange(num_valid, device=flat.device)
    assert found.row_of.tolist() == want.tolist()
    blocks = []
    first = 0
    for expert in range(found.num_experts):
        end = first + int((flat == expert).sum())
        while first < end:
            blocks.append([expert, first, min(first + found.block_rows, end)])
            first = blocks[-1][2]
    assert found.blocks[: len(blocks)].tolist() == blocks
    assert (found.blocks[len(blocks) :, 0] == -1).all()
