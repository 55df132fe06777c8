"""Rope, head norms and the cache's new rows in one launch against the sequence of references, bit for bit."""

import pytest
import torch
from torch import Tensor

from espalier.kernels.norm.reference import rms_norm_ieee
from espalier.kernels.rope.frequencies import RopeConfig, inverse_frequencies
from espalier.kernels.rope.reference import rope_table, rotate
from tests.support.bits import captured, poisoned, same_bits
from tests.support.interpret import interpreted

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
CONFIGS = (
    RopeConfig(theta=1e4),
    RopeConfig(theta=5e5, rope_type="llama3", factor=8.0, original_max_positions=64),
    RopeConfig(theta=1e6, rope_type="yarn", factor=4.0, original_max_positions=64),
)
BLOCK = 16


class Round:
    """Rows of q, k, v side by side, their positions and slots (some padding), and a cache of NaN."""

    def __init__(
        self,
        dtype: torch.dtype,
        rows: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        config: RopeConfig,
    ) -> None:
        self.cos, self.sin = rope_table(inverse_frequencies(config, rotary_dim), 100, config.cos_sin_scale)
        side_by_side = (torch.randn(rows, heads + 2 * kv_heads, head_dim) * 2).to(dtype)
        self.q = side_by_side[:, :heads]
        self.k, self.v = side_by_side[:, heads:].chunk(2, dim=1)
        self.positions = torch.randint(0, 100, (rows,), dtype=torch.int32)
        self.num_blocks = rows // BLOCK + 2
        self.slots = torch.randperm(self.num_blocks * BLOCK)[:rows]
        self.slots[rows // 2 :: 5] = -1
        self.weights = (torch.rand(head_dim), torch.rand(head_dim))

    def run(
        self, device: str, q_dtype: torch.dtype, cache_dtype: torch.dtype, normed: bool, unit_offset: bool
    ) -> list[Tensor]:
        from espalier.kernels.rope.norm_rotate_store import norm_rotate_store

        out = poisoned(*self.q.shape, dtype=q_dtype, device=device)
        keys, values = self.cache(cache_dtype, device), self.cache(cache_dtype, device)
        q, k, v, cos, sin, positions, slots, first, second = (
            x.to(device)
            for x in (self.q, self.k, self.v, self.cos, self.sin, self.positions, self.slots, *self.weights)
        )
        weights = (first, second) if normed else None
        norm_rotate_store(
            q, k, v, weights, 1e-6, cos, sin, positions, slots, out, keys, values, unit_offset=unit_offset
        )
        return [out, keys, values]

    def want(self, q_dtype: torch.dtype, cache_dtype: torch.dtype, normed: bool, unit_offset: bool) -> list[Tensor]:
        q, k = (
            rotate(
                rms_norm_ieee(x, weight, 1e-6, unit_offset=unit_offset) if normed else x,
                self.cos[self.positions],
                self.sin[self.positions],
            )
            for x, weight in zip((self.q, self.k), self.weights, strict=True)
        )
        keys, values = self.cache(cache_dtype, "cpu"), self.cache(cache_dtype, "cpu")
        for row, slot in enumerate(self.slots.tolist()):
            if slot >= 0:
                keys[slot // BLOCK, :, slot % BLOCK] = k[row].to(cache_dtype)
                values[slot // BLOCK, :, slot % BLOCK] = self.v[row].to(cache_dtype)
        return [q.to(q_dtype), keys, values]

    def cache(self, dtype: torch.dtype, device: str) -> Tensor:
        return poisoned(self.num_blocks, self.k.shape[1], BLOCK, self.k.shape[2], dtype=dtype, device=device)


def check_fused(device: str, round_: Round, q_dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    for normed, unit_offset in ((False, False), (True, False), (True, True)):
        got = round_.run(device, q_dtype, cache_dtype, normed, unit_offset)
        for a, b in zip(got, round_.want(q_dtype, cache_dtype, normed, unit_offset), strict=True):
            assert same_bits(a, b), (normed, unit_offset)


def check_alone(device: str, round_: Round, dtype: torch.dtype) -> None:
    from espalier.kernels.rope.rotate_heads import rotate_heads

    out = poisoned(*round_.q.shape, dtype=dtype, device=device)
    q, cos, sin, positions = (x.to(device) for x in (round_.q, round_.cos, round_.sin, round_.positions.long()))
    rotate_heads(q, cos, sin, positions, out)
    assert same_bits(out, rotate(round_.q, round_.cos[round_.positions], round_.sin[round_.positions]).to(dtype))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (96, 96), (128, 32), (128, 96)])
@interpreted
def test_interpreted(head_dim: int, rotary_dim: int) -> None:
    round_ = Round(torch.float16, 3, 5, 2, head_dim, rotary_dim, CONFIGS[1])
    check_fused("cpu", round_, torch.float32, torch.float16)
    check_alone("cpu", round_, torch.float16)


@interpreted
def test_a_position_outside_of_the_table_is_nan() -> None:
    from espalier.kernels.rope.rotate_heads import rotate_heads

    round_ = Round(torch.float32, 3, 1, 1, 64, 32, CONFIGS[0])
    out = poisoned(3, 1, 64)
    rotate_heads(round_.q, round_.cos, round_.sin, torch.tensor([-1, 100, 99]), out)
    assert out[:2, :, :32].isnan().all() and not out[2].isnan().any() and not out[:, :, 32:].isnan().any()


def test_partial_rope_turns_the_first_dimensions() -> None:
    cos, sin = rope_table(inverse_frequencies(CONFIGS[0], 32), 8, 1.0)
    x = torch.randn(8, 2, 64)
    y = rotate(x, cos, sin)
    assert torch.equal(y[..., :32], rotate(x[..., :32].contiguous(), cos, sin)) and torch.equal(
        y[..., 32:], x[..., 32:]
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("number", "head_dim", "rotary_dim"),
    [
        (0, 64, 64),
        (1, 80, 80),
        (2, 96, 96),
        (3, 112, 64),
        (4, 128, 128),
        (5, 192, 96),
        (6, 256, 64),
        (7, 256, 256),
        (8, 128, 32),
    ],
)
def test_fused(number: int, head_dim: int, rotary_dim: int) -> None:
    round_ = Round(FLOATS[number % 3], 37, 9, 3, head_dim, rotary_dim, CONFIGS[number // 3])
    check_fused("cuda", round_, FLOATS[(number + 1) % 3], FLOATS[number // 3])
    check_alone("cuda", round_, FLOATS[number // 3])


@pytest.mark.gpu
def test_no_row_depends_on_the_call() -> None:
    from espalier.kernels.rope.norm_rotate_store import norm_rotate_store

    round_ = Round(torch.float16, 1000, 24, 4, 128, 128, CONFIGS[0])
    q, k, v, cos, sin, positions, slots, *weights = (
        x.cuda()
        for x in (round_.q, round_.k, round_.v, round_.cos, round_.sin, round_.positions, round_.slots, *round_.weights)
    )
    whole = round_.run("cuda", torch.float16, torch.float16, normed=True, unit_offset=False)
    for first, last in ((0, 1), (200, 201), (7, 24), (500, 628)):
        out = poisoned(last - first, 24, 128, dtype=torch.float16, device="cuda")
        keys, values = round_.cache(torch.float16, "cuda"), round_.cache(torch.float16, "cuda")
        rows = slice(first, last)

        def call(rows: slice = rows, out: Tensor = out, keys: Tensor = keys, values: Tensor = values) -> None:
            norm_rotate_store(
                q[rows],
                k[rows],
                v[rows],
                (weights[0], weights[1]),
                1e-6,
                cos,
                sin,
                positions[rows],
                slots[rows],
                out,
                keys,
                values,
            )

        call()
        eager = [x.clone() for x in (out, keys, values)]
        for got in (eager, captured(call, [out, keys, values])):
            assert same_bits(got[0], whole[0][rows])
            written = slots[rows][slots[rows] >= 0]
            for cached, all_rows in zip(got[1:], whole[1:], strict=True):
                assert same_bits(
                    cached[written // BLOCK, :, written % BLOCK], all_rows[written // BLOCK, :, written % BLOCK]
                )
                assert int((~cached.isnan()).sum()) == written.numel() * 4 * 128
