"""Experts on the GPU: every product has the bits of its expert's linear alone, every token those of the token alone, eager or captured."""

import functools

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from espalier.kernels.device import device_class
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.linear.dispatch import Form
from espalier.kernels.linear.exl3_linear import allocate_scratch
from espalier.kernels.linear.expert_group import ExpertGroup, stack_experts
from espalier.kernels.linear.expert_route import allocate_route, block_rows, route
from espalier.kernels.linear.expert_rows import gather_rotate
from espalier.kernels.linear.experts import ExpertBuffers, allocate_buffers, expert_mlp, scratch_size
from espalier.kernels.linear.group import LinearGroup, pack_group
from tests.support.linears import check_route, move, random_linear, run_form

pytestmark = pytest.mark.gpu

EXPERTS, HIDDEN, INNER, TOP_K = 12, 640, 256, 3


@functools.cache
def groups() -> tuple[list[LinearGroup], list[LinearGroup]]:
    """Each expert's gate and up, and its down."""
    gate_ups, downs = [], []
    for expert in range(EXPERTS):
        pair = [move(random_linear(HIDDEN, INNER, 4.0, Codebook.MUL1, 10 * expert + i), "cuda") for i in range(2)]
        gate_ups.append(pack_group(pair, [None, torch.randn(INNER, device="cuda")]))
        downs.append(pack_group([move(random_linear(INNER, HIDDEN, 3.0, Codebook.MCG, 1000 + expert), "cuda")], [None]))
    return gate_ups, downs


@functools.cache
def stacked() -> tuple[ExpertGroup, ExpertGroup]:
    gate_ups, downs = groups()
    return stack_experts(gate_ups), stack_experts(downs)


def choices(tokens: int, experts: int = EXPERTS, top_k: int = TOP_K) -> Tensor:
    draw = torch.Generator().manual_seed(tokens)
    return torch.stack([torch.randperm(experts, generator=draw)[:top_k] for _ in range(tokens)]).int().cuda()


def memory(tokens: int) -> ExpertBuffers:
    buffers = allocate_buffers(*stacked(), tokens, TOP_K)
    for part in (buffers.rotated, buffers.gate_up, buffers.down):
        part.fill_(torch.nan)
    return buffers


def mlp(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    buffers = memory(x.shape[0])
    scratch = allocate_scratch(scratch_size(*stacked(), buffers), x.device)
    scratch.partials.fill_(torch.nan)
    out = torch.full((x.shape[0], HIDDEN), torch.nan, device="cuda")
    expert_mlp(x, ids, weights, *stacked(), buffers, scratch, out=out)
    assert not scratch.counters.any()
    return out


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 256, 8), (3, 7, 2), (500, 64, 6), (8192, 128, 8)])
def test_route(tokens: int, experts: int, top_k: int) -> None:
    ids = choices(tokens, experts, top_k)
    ids[0, 0] = -1
    order = allocate_route(ids.numel(), experts, block_rows(ids.numel(), experts, 8, 64), ids.device)
    order.pair_of.fill_(-77)
    order.blocks.fill_(-77)
    order.row_of.fill_(-77)
    route(ids, order)
    check_route(ids, order)


@pytest.mark.parametrize("name", ["expert_plain", "expert_mma"])
@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
def test_products_equal_each_experts_own(name: str, tokens: int) -> None:
    if name == "expert_mma" and not device_class(torch.device("cuda")).gluon:
        pytest.skip(f"{name} does not run on this device")
    from espalier.kernels.linear.dispatch import load_kernels

    form, (group, _) = load_kernels(name, "expert_plain"), stacked()
    ids = choices(tokens)
    ids[-1, 0] = EXPERTS  # nobody's
    order = allocate_route(ids.numel(), EXPERTS, block_rows(ids.numel(), EXPERTS, *form.BLOCK_ROWS), ids.device)
    route(ids, order)
    x = torch.randn(tokens, HIDDEN, device="cuda").half()
    x_rot = torch.full((2, ids.numel(), HIDDEN), torch.nan, dtype=torch.float16, device="cuda")
    gather_rotate(x, ids, order, group.suh, x_rot)
    scratch = allocate_scratch(form.scratch_size(group, order), x.device)
    scratch.partials.fill_(torch.nan)
    out = torch.full((ids.numel(), group.out_features), torch.nan, device="cuda")
    form.launch(x_rot, group, order, out, scratch)
    assert not scratch.counters.any()
    pair_of, chosen = order.pair_of.cpu(), ids.flatten().cpu()
    for expert in range(EXPERTS):
        rows = [row for row, pair in enumerate(pair_of.tolist()) if pair >= 0 and chosen[pair] == expert]
        if rows:
            alone = run_form(Form.PLAIN, x[pair_of[rows].cuda() // TOP_K], groups()[0][expert], torch.float32)
            assert torch.equal(out[rows], alone), expert
    assert out[pair_of.tolist().index(-1) :].isnan().all()


def test_a_token_does_not_see_the_others() -> None:
    tokens = 200
    x, ids = torch.randn(tokens, HIDDEN, device="cuda").half(), choices(tokens)
    weights = torch.rand(tokens, TOP_K, device="cuda")
    whole = mlp(x, ids, weights)
    assert not whole.isnan().any()
    for some in (slice(0, 1), slice(7, 9), slice(150, 200), slice(0, 65)):
        assert torch.equal(mlp(x[some], ids[some].contiguous(), weights[some].contiguous()), whole[some]), some
    turned = torch.randperm(tokens, device="cuda")
    assert torch.equal(mlp(x[turned], ids[turned], weights[turned]), whole[turned])
    # All tokens to one set of experts.
    crowded = ids[:1].expand(tokens, -1).contiguous()
    assert torch.equal(mlp(x, crowded, weights)[0], whole[0])


@pytest.mark.parametrize("tokens", [1, 70])
def test_captured_equals_eager(tokens: int) -> None:
    x, ids = torch.randn(2 * tokens, HIDDEN, device="cuda").half(), choices(2 * tokens)
    weights = torch.rand(2 * tokens, TOP_K, device="cuda")
    eager = mlp(x[:tokens], ids[:tokens].contiguous(), weights[:tokens].contiguous())
    held = [part[tokens:].clone() for part in (x, ids, weights)]
    out, buffers = torch.full_like(eager, torch.nan), memory(tokens)
    scratch = allocate_scratch(scratch_size(*stacked(), buffers), x.device)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    expert_mlp(*held, *stacked(), buffers, scratch, out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        expert_mlp(*held, *stacked(), buffers, scratch, out=out)
    for part, given in zip(held, (x, ids, weights), strict=True):
        part.copy_(given[:tokens])
    for _ in range(2):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, eager)
