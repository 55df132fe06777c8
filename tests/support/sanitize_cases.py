"""Small launches of every kernel for compute-sanitizer: odd sizes, several programs, all roles of a program. Inputs are made on the CPU.

Kernels are imported when a case runs, so that the list can be read anywhere. A case fails when a result is not finite or not the same twice.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.linear.group import LinearGroup, pack_group
from tests.support.attention_cases import PagedCase, Piece
from tests.support.linears import move, random_linear

WIDTH_IN = 1024  # two splits
MEMBERS = ((256, 3.5, Codebook.MUL1), (128, 4.0, Codebook.MCG))  # two runs: one launch decodes both
FORM_ROWS = {
    "plain": (3, 33),
    "rows_mma": (3, 17),
    "rows_wgmma": (33, 100),
    "prompt_mma": (3, 130),
    "prompt_wgmma": (130, 300),
    "prompt_decoded": (130, 300),
}


def randn(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=draw).to(dtype).cuda()


def empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def same_twice(out: Tensor, launch: Callable[[], object]) -> None:
    """Launch twice into poisoned memory."""
    results = []
    for _ in range(2):
        out.fill_(float("nan"))
        launch()
        results.append(out.cpu())
    assert torch.isfinite(results[0].float()).all()
    assert torch.equal(*results)


def two_linears() -> LinearGroup:
    members = [
        move(random_linear(WIDTH_IN, width, rate, codebook, seed), "cuda")
        for seed, (width, rate, codebook) in enumerate(MEMBERS)
    ]
    return pack_group(members, [randn(width, dtype=torch.float32) for width, _, _ in MEMBERS])


def linear(form: str) -> None:
    from espalier.kernels.device import device_class
    from espalier.kernels.linear.dispatch import Form, load_form, possible_forms
    from espalier.kernels.linear.exl3_linear import allocate_scratch, linear_rotated

    if Form(form) not in possible_forms(device_class(torch.device("cuda"))):
        print(f"{form} is not for this device")
        return
    group = two_linears()
    for rows in FORM_ROWS[form]:
        x_rot = randn(len(MEMBERS), rows, WIDTH_IN)
        size = load_form(Form(form)).scratch_size(group.in_features, group.widths, rows)
        scratch = allocate_scratch(size, x_rot.device)
        out = empty(rows, group.out_features, dtype=torch.float32)
        same_twice(out, functools.partial(linear_rotated, x_rot, group, scratch, out, Form(form)))
        assert not scratch.counters.any()


def experts() -> None:
    from espalier.kernels.linear.exl3_linear import allocate_scratch
    from espalier.kernels.linear.expert_group import ExpertGroup, stack_experts
    from espalier.kernels.linear.experts import allocate_buffers, expert_mlp, scratch_size

    def stack(num_in: int, widths: tuple[int, ...]) -> ExpertGroup:
        layers = [[random_linear(num_in, width, 4.0, Codebook.MUL1, seed) for width in widths] for seed in range(5)]
        return stack_experts(
            [pack_group([move(one, "cuda") for one in layer], [None] * len(widths)) for layer in layers]
        )

    tokens, top_k = 19, 2
    gate_up, down = stack(256, (128, 128)), stack(128, (256,))
    ids = torch.stack([torch.arange(tokens) % 4, torch.full((tokens,), 4)], dim=1).int().cuda()
    x, weights, out = randn(tokens, 256), randn(tokens, top_k, dtype=torch.float32), empty(tokens, 256)
    buffers = allocate_buffers(gate_up, down, tokens, top_k)
    scratch = allocate_scratch(scratch_size(gate_up, down, buffers), x.device)
    same_twice(out, lambda: expert_mlp(x, ids, weights, gate_up, down, buffers, scratch, out=out))


def sampler() -> None:
    from tests.support.sampling_runs import Round, random_case

    # Enough rows for every kind of work that a row can ask for.
    rows = Round([random_case(3001, seed, "cuda") for seed in range(24)])
    rows.run()
    first = rows.results()
    rows.run()
    assert rows.results() == first


def rotate_input() -> None:
    from espalier.kernels.hadamard.rotate import rotate_input

    x, suh = randn(5, 200), randn(2, 384)
    out = empty(2, 5, 384)
    same_twice(out, lambda: rotate_input(x, suh, out=out))


def rotate_back() -> None:
    from espalier.kernels.hadamard.rotate import rotate_back

    sums, svh, bias = randn(5, 384, dtype=torch.float32), randn(384), randn(384, dtype=torch.float32)
    out = empty(5, 384)
    same_twice(out, lambda: rotate_back(sums, svh, bias, out))


def norms() -> None:
    from espalier.kernels.norm.add_norm_rotate import add_norm_rotate
    from espalier.kernels.norm.rms_norm import rms_norm

    residual, y, weight, suh = randn(5, 200, dtype=torch.float32), randn(5, 200), randn(200), randn(2, 256)
    out = empty(5, 200)
    same_twice(out, lambda: rms_norm(y, weight, 1e-5, out))
    total, normed, rotated = empty(5, 200, dtype=torch.float32), empty(5, 200), empty(2, 5, 256)
    for result in (total, normed, rotated):
        same_twice(
            result,
            lambda: add_norm_rotate(
                residual, y, weight, 1e-5, suh, total=total, normed=normed, rotated=rotated, unit_offset=True
            ),
        )


def activations() -> None:
    from espalier.kernels.activation.silu_mul import silu_mul
    from espalier.kernels.activation.silu_mul_rotate import silu_mul_rotate

    gate_up, suh = randn(5, 400), randn(1, 256)
    out, rotated = empty(5, 200), empty(1, 5, 256)
    same_twice(out, lambda: silu_mul(gate_up, out))
    same_twice(rotated, lambda: silu_mul_rotate(gate_up, suh, rotated))


def embedding() -> None:
    from espalier.kernels.embedding.gather import gather

    ids, table, out = torch.tensor([3, 0, 62, 7, 7]).cuda(), randn(63, 200), empty(5, 200, dtype=torch.float32)
    same_twice(out, lambda: gather(ids, table, out))


def heads() -> None:
    from espalier.kernels.attention.store import store_kv
    from espalier.kernels.rope.norm_rotate_store import norm_rotate_store
    from espalier.kernels.rope.rotate_heads import rotate_heads

    q, k, v = randn(5, 6, 96), randn(5, 2, 96), randn(5, 2, 96)
    weights = (randn(96), randn(96))
    cos, sin = (randn(40, 32, dtype=torch.float32) for _ in range(2))
    positions = torch.tensor([0, 39, 7, 8, 9]).cuda()
    slots = torch.tensor([0, 47, -1, 16, 17]).cuda()
    keys, values, out = randn(3, 2, 16, 96), randn(3, 2, 16, 96), empty(5, 6, 96)
    same_twice(out, lambda: rotate_heads(q, cos, sin, positions, out))
    same_twice(out, lambda: norm_rotate_store(q, k, v, weights, 1e-5, cos, sin, positions, slots, out, keys, values))
    store_kv(k, v, keys, values, slots)
    assert torch.isfinite(keys.float()).all()


def attention(
    lengths: Sequence[int], rows: Sequence[int], window: int | None, room: int | None = None, bound: int | None = None
) -> None:
    """room: lanes of the table. bound: of positions."""
    from espalier.kernels.attention.paged import paged_attention, scratch_size
    from espalier.kernels.device import device_class
    from espalier.kernels.linear.exl3_linear import allocate_scratch

    case = PagedCase(lengths, 6, 2, 96, device="cuda")
    pieces = [
        Piece(lane, length - count, count) for lane, (length, count) in enumerate(zip(lengths, rows, strict=True))
    ]
    lanes, q = case.table(pieces, lanes=room, max_context=bound), case.queries(pieces)
    shape = {"heads": 6, "kv_heads": 2, "head_dim": 96, "window": window}
    size = scratch_size(device_class(q.device), lanes.num_lanes, lanes.max_rows, lanes.max_context, **shape)
    scratch = allocate_scratch(size, q.device)
    out = torch.empty_like(q)
    same_twice(
        out,
        lambda: paged_attention(q, case.keys, case.values, lanes, scratch, scale=case.scale, window=window, out=out),
    )


CASES: dict[str, Callable[[], None]] = {f"linear-{form}": functools.partial(linear, form) for form in FORM_ROWS} | {
    "experts": experts,
    "sampler": sampler,
    "rotate-input": rotate_input,
    "rotate-back": rotate_back,
    "norms": norms,
    "activations": activations,
    "embedding": embedding,
    "heads": heads,
    "attention-decode": functools.partial(attention, (700, 33), (1, 3), None),
    "attention-window": functools.partial(attention, (700, 33), (2, 1), 300),
    "attention-prefill": functools.partial(attention, (400, 90), (150, 90), None),
    "attention-mixed": functools.partial(attention, (4500, 90, 700), (1, 40, 3), None, 64, 9000),
}
