"""Rows of the mixture of experts: gate, up and down of every chosen expert, with routing, rotations and the weighted sum."""

import functools

import torch

from espalier.kernels.bench.linear import random_group
from espalier.kernels.bench.registry import OURS, BenchCase, Call, Inputs, Workload
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.linear.expert_group import ExpertGroup, stack_experts
from espalier.kernels.linear.experts import allocate_buffers, expert_mlp, scratch_size

# (hidden, inner, experts, top_k)
SHAPES = ((2048, 768, 128, 8),)
TOKENS = (1, 8, 64, 512, 4096)
RATE = 4.0
_POWER_BOUND_TOKENS = 512
_CHOICES = 8


def cases() -> list[BenchCase]:
    """One model's experts, from one token to a prompt."""
    return [
        BenchCase(
            "experts",
            {"hidden": hidden, "inner": inner, "experts": experts, "top_k": top_k, "rate": RATE, "tokens": tokens},
            functools.partial(_experts, hidden, inner, experts, top_k, tokens),
            shares=(hidden, inner, experts, top_k),
        )
        for hidden, inner, experts, top_k in SHAPES
        for tokens in TOKENS
    ]


def _experts(hidden: int, inner: int, experts: int, top_k: int, tokens: int, inputs: Inputs) -> Workload:
    def stack(in_features: int, widths: tuple[int, ...]) -> ExpertGroup:
        return stack_experts([random_group(inputs, in_features, widths, RATE, Codebook.MUL1) for _ in range(experts)])

    gate_up, down = inputs.once("weights", lambda: (stack(hidden, (inner, inner)), stack(inner, (hidden,))))
    x, out = inputs.randn(tokens, hidden), inputs.empty(tokens, hidden)
    # Other experts in every call: a few tokens' experts would stay in the L2.
    scores = inputs.randn(_CHOICES, tokens, experts, dtype=torch.float32)
    weights, ids = scores.softmax(-1).topk(top_k)
    buffers = allocate_buffers(gate_up, down, tokens, top_k)
    scratch = inputs.scratch(scratch_size(gate_up, down, buffers))
    used = sum(len(set(choice.flatten().tolist())) for choice in ids) / _CHOICES

    def run(i: int) -> None:
        expert_mlp(x, ids[i], weights[i], gate_up, down, buffers, scratch, out=out)

    return Workload(
        {OURS: Call(run, _CHOICES)},
        num_bytes=int(used * 3 * hidden * inner * RATE / 8),
        flops=2 * tokens * top_k * 3 * hidden * inner,
        power_bound=tokens >= _POWER_BOUND_TOKENS,
    )
