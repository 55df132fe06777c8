"""Experts: rows sorted as they should be, and each (token, expert) product equal to the same expert's linear alone."""

import pytest
import torch

pytest.importorskip("triton")

from espalier.kernels.activation.reference import silu_mul_ieee
from espalier.kernels.counters import ScratchSize
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.hadamard.reference import rotate_input
from espalier.kernels.linear import reference
from espalier.kernels.linear.exl3_linear import allocate_scratch
from espalier.kernels.linear.expert_group import stack_experts
from espalier.kernels.linear.expert_route import Route, allocate_route, block_rows, max_blocks, route
from espalier.kernels.linear.expert_rows import gate_rotate, gather_rotate, weighted_sum
from espalier.kernels.linear.experts import allocate_buffers, expert_mlp, expert_product, scratch_size
from espalier.kernels.linear.group import pack_group
from tests.support.interpret import interpreted
from tests.support.linears import check_route, random_linear, relative_error


def routed(ids: torch.Tensor, num_experts: int, rows: int) -> Route:
    found = allocate_route(ids.numel(), num_experts, rows, ids.device)
    for part in (found.pair_of, found.row_of, found.blocks):
        part.fill_(-77)
    route(ids, found)
    return found


@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts", "rows"), [(1, 1, 1, 16), (1, 2, 5, 16), (40, 4, 7, 16), (300, 4, 3, 64)]
)
@interpreted
def test_route_is_a_stable_sort(tokens: int, top_k: int, num_experts: int, rows: int) -> None:
    ids = torch.randint(0, num_experts, (tokens, top_k), dtype=torch.int32)
    check_route(ids, routed(ids, num_experts, rows))


@pytest.mark.parametrize("chosen", [[0] * 40, [6] * 40, [-1] * 40, [3, -1, 7, 99, 3, 6, 0, -1] * 5])
@interpreted
def test_route_of_uneven_choices(chosen: list[int]) -> None:
    ids = torch.tensor(chosen, dtype=torch.int64).view(-1, 2)
    check_route(ids, routed(ids, 7, 16))


def test_blocks_are_bounded_by_shapes() -> None:
    draw = torch.Generator().manual_seed(0)
    for pairs, experts in ((1, 8), (8, 256), (16, 4), (512, 8), (1000, 3)):
        rows = block_rows(pairs, experts, 16, 64)
        for spread in (1, 2, experts):
            counts = torch.bincount(torch.randint(0, min(spread, experts), (pairs,), generator=draw), minlength=experts)
            assert int((-(-counts // rows)).sum()) <= max_blocks(pairs, experts, rows)
    assert max_blocks(8, 256, 16) == 8
    assert max_blocks(64, 4, 16) == 7
    assert block_rows(8, 256, 8, 64) == 8
    assert block_rows(8192, 8, 16, 64) == 64


def test_route_refuses_other_shapes() -> None:
    with pytest.raises(ValueError, match="ids"):
        route(torch.zeros(3, 2, dtype=torch.int32), allocate_route(4, 8, 16, torch.device("cpu")))
    with pytest.raises(ValueError, match="ids"):
        route(torch.zeros(2, 2), allocate_route(4, 8, 16, torch.device("cpu")))


EXPERTS, HIDDEN, INNER = 3, 256, 128


def experts_of(rate: float, codebook: Codebook) -> tuple[list, list]:  # type: ignore[type-arg]
    """Per expert: [gate, up], and down."""
    first = [[random_linear(HIDDEN, INNER, rate, codebook, 10 * e + i) for i in range(2)] for e in range(EXPERTS)]
    return first, [random_linear(INNER, HIDDEN, rate, codebook, 100 + e) for e in range(EXPERTS)]


@interpreted
def test_rows_have_the_definitions_bits() -> None:
    """Everything between the products, row by row."""
    gate_ups, downs = experts_of(2.0, Codebook.MUL1)
    first = stack_experts([pack_group(members, [None, None]) for members in gate_ups])
    second = stack_experts([pack_group([down], [None]) for down in downs])
    ids = torch.tensor([[2, 0], [0, -1], [2, 1], [0, 2], [1, 0]])
    order = routed(ids, EXPERTS, 16)
    pairs = [int(pair) for pair in order.pair_of if pair >= 0]
    for dtype in (torch.float16, torch.float32):
        x = torch.randn(5, HIDDEN - 20).to(dtype)
        rotated = torch.full((2, 10, HIDDEN), 7.0, dtype=torch.float16)
        gather_rotate(x, ids, order, first.suh, rotated)
        for row, pair in enumerate(pairs):
            for member in range(2):
                suh = gate_ups[ids.flatten()[pair]][member].suh
                assert torch.equal(rotated[member, row], rotate_input(x[pair // 2][None], suh)[0])
        assert (rotated[:, len(pairs) :] == 7.0).all()
    gate_up = torch.randn(10, 2 * INNER).half()
    inner = torch.full((1, 10, INNER), 7.0, dtype=torch.float16)
    gate_rotate(gate_up, ids, order, second.suh, inner)
    for row, pair in enumerate(pairs):
        y = silu_mul_ieee(*gate_up[row].split(INNER))
        assert torch.equal(inner[0, row], rotate_input(y[None], downs[ids.flatten()[pair]].suh)[0])
    y, weights = torch.randn(10, HIDDEN), torch.rand(5, 2)
    out = torch.full((5, HIDDEN - 20), torch.nan)
    weighted_sum(y, order, weights, out)
    for token in range(5):
        total = torch.zeros(HIDDEN)
        for slot in range(2):
            if ids[token, slot] >= 0:
                total = total + weights[token, slot] * y[order.row_of[token * 2 + slot]]
        assert torch.equal(out[token], total[: HIDDEN - 20])


@pytest.mark.parametrize(("rate", "codebook"), [(4.0, Codebook.MUL1), (3.0, Codebook.MCG), (2.5, Codebook.MUL1)])
@interpreted
def test_products_equal_each_experts_own(rate: float, codebook: Codebook) -> None:
    gate_ups, _ = experts_of(rate, codebook)
    biases = [[torch.randn(INNER), torch.randn(INNER)] for _ in range(EXPERTS)]
    groups = [pack_group(*case) for case in zip(gate_ups, biases, strict=True)]
    stacked = stack_experts(groups)
    ids = torch.tensor([[2, 0], [0, -1], [2, 1]])
    order = routed(ids, EXPERTS, 16)
    x = torch.randn(3, HIDDEN).half()
    rotated = torch.zeros(2, 6, HIDDEN, dtype=torch.float16)
    gather_rotate(x, ids, order, stacked.suh, rotated)
    out = torch.full((6, 2 * INNER), torch.nan)
    expert_product(rotated, stacked, order, out, allocate_scratch(ScratchSize(), x.device))
    for row, pair in enumerate(order.pair_of.tolist()):
        if pair < 0:
            assert out[row].isnan().all()
            continue
        expert = int(ids.flatten()[pair])
        want = reference.linear(x[pair // 2][None], gate_ups[expert], biases[expert], torch.float32)[0]
        assert relative_error(out[row], want) < 2e-6


@interpreted
def test_the_whole_mlp() -> None:
    gate_ups, downs = experts_of(4.0, Codebook.MUL1)
    first = stack_experts([pack_group(members, [None, None]) for members in gate_ups])
    second = stack_experts([pack_group([down], [None]) for down in downs])
    ids = torch.tensor([[2, 0], [0, -1], [2, 1]], dtype=torch.int32)
    x, weights = torch.randn(3, HIDDEN).half(), torch.rand(3, 2)
    buffers = allocate_buffers(first, second, 3, 2)
    scratch = allocate_scratch(scratch_size(first, second, buffers), x.device)
    out = torch.full((3, HIDDEN), torch.nan)
    expert_mlp(x, ids, weights, first, second, buffers, scratch, out=out)
    for token in range(3):
        want = torch.zeros(HIDDEN)
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            if expert >= 0:
                gate_up = reference.linear(x[token][None], gate_ups[expert], [None, None])
                inner = silu_mul_ieee(*gate_up.split(INNER, dim=1))
                want += weight * reference.linear(inner, [downs[expert]], [None])[0].float()
        assert relative_error(out[token], want) < 1e-3  # fp16 between the products
    alone = torch.full((1, HIDDEN), torch.nan)
    buffers = allocate_buffers(first, second, 1, 2)
    expert_mlp(x[2:], ids[2:], weights[2:], first, second, buffers, scratch, out=alone)
    assert torch.equal(alone[0], out[2])


def test_experts_that_one_launch_cannot_serve_are_refused() -> None:
    def group(width: int, rate: float, bias: bool = False):  # type: ignore[no-untyped-def]
        return pack_group([random_linear(128, width, rate, Codebook.MUL1)], [torch.zeros(width) if bias else None])

    with pytest.raises(ValueError, match="widths"):
        stack_experts([group(128, 4.0), group(256, 4.0)])
    with pytest.raises(ValueError, match=r"rates or codebooks: \[\(3.0, 'mul1'\), \(4.0, 'mul1'\)\]"):
        stack_experts([group(128, 4.0), group(128, 3.0)])
    with pytest.raises(ValueError, match="bias in 1 of 2"):
        stack_experts([group(128, 4.0, True), group(128, 4.0)])
    both = stack_experts([group(128, 4.0)])
    with pytest.raises(ValueError, match="members"):
        allocate_buffers(both, both, 1, 1)
