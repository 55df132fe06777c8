"""Paged attention: right against fp64, and each row's bits its own however rows are cut, packed and placed."""

import math

import pytest
import torch

from espalier.kernels.attention.plan import LaneSpan, plan_attention
from espalier.kernels.attention.reference import Workspace, paged_attention

BLOCK = 16
HEADS = [(4, 4, 64), (4, 2, 64), (6, 1, 32)]


class Cache:
    """One layer's keys and values for sequences of given lengths, their blocks shuffled; a cell nobody wrote holds NaN."""

    def __init__(self, lengths: list[int], kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(1)
        counts = [-(-n // BLOCK) for n in lengths]
        self.zero_block = sum(counts) + 3
        ids = torch.randperm(self.zero_block, generator=generator)
        shape = (self.zero_block + 1, kv_heads, BLOCK, head_dim)
        self.keys, self.values = torch.full(shape, math.nan, dtype=dtype), torch.full(shape, math.nan, dtype=dtype)
        self.keys[-1], self.values[-1] = 0.0, 0.0
        self.workspace = Workspace()
        self.blocks, self.k, self.v = [], [], []
        for length, blocks in zip(lengths, ids.split([*counts, 3]), strict=False):
            k, v = (torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
            for position in range(length):
                self.keys[blocks[position // BLOCK], :, position % BLOCK] = k[position]
                self.values[blocks[position // BLOCK], :, position % BLOCK] = v[position]
            self.blocks.append(blocks), self.k.append(k.double()), self.v.append(v.double())

    def attend(self, q: torch.Tensor, lanes: list[tuple[int, int, int]]) -> torch.Tensor:
        """q of lanes (sequence, start, rows) laid out one after the other, padded to 8 rows."""
        spans, row = [], 0
        for sequence, start, rows in lanes:
            spans.append(LaneSpan(row, rows, start, self.blocks[sequence][: -(-(start + rows) // BLOCK)]))
            row += rows
        padded = torch.zeros(-(-row // 8) * 8, *q.shape[1:])
        padded[:row] = q
        plan = plan_attention(spans, num_kv_heads=self.keys.shape[1], block_size=BLOCK, zero_block=self.zero_block)
        return paged_attention(padded, self.keys, self.values, plan, self.workspace)[:row]

    def exact(self, q: torch.Tensor, sequence: int, start: int) -> torch.Tensor:
        """The definition, in fp64."""
        group = q.shape[1] // self.keys.shape[1]
        k, v = (x[sequence].repeat_interleave(group, 1) for x in (self.k, self.v))
        scores = torch.einsum("rhd,khd->rhk", q.double(), k) / math.sqrt(q.shape[-1])
        hidden = torch.arange(k.shape[0]) > torch.arange(start, start + q.shape[0])[:, None]
        return torch.einsum("rhk,khd->rhd", scores.masked_fill(hidden[:, None], -math.inf).softmax(-1), v)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("length", [1, 7, 16, 127, 128, 129, 300])
def test_matches_the_definition(heads: int, kv_heads: int, head_dim: int, length: int) -> None:
    cache = Cache([length], kv_heads, head_dim)
    q = torch.randn(length, heads, head_dim)
    out = cache.attend(q, [(0, 0, length)])
    torch.testing.assert_close(out.double(), cache.exact(q, 0, 0), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_caches_are_read_as_they_are(dtype: torch.dtype) -> None:
    cache = Cache([140], 2, 64, dtype)
    q = torch.randn(140, 4, 64)
    torch.testing.assert_close(cache.attend(q, [(0, 0, 140)]).double(), cache.exact(q, 0, 0), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_a_rows_bits_are_its_own(heads: int, kv_heads: int, head_dim: int, num_threads: int) -> None:
    lengths = [300, 5, 129, 40]
    cache = Cache(lengths, kv_heads, head_dim)
    q = torch.randn(300, heads, head_dim)
    torch.set_num_threads(num_threads)
    try:
        whole = cache.attend(q, [(0, 0, 300)])
        for cuts in ([8] * 37 + [4], [1] * 17 + [127, 128, 28], [130, 3, 9, 158]):
            parts, start = [], 0
            for rows in cuts:
                parts.append(cache.attend(q[start : start + rows], [(0, start, rows)]))
                start += rows
            assert torch.equal(torch.cat(parts), whole)
        # In company: other lanes before and behind, short and long.
        others = torch.randn(5 + 129 + 1, heads, head_dim)
        for start, rows in ((299, 1), (250, 3), (100, 150)):
            mixed = torch.cat([others[:5], q[start : start + rows], others[5:]])
            out = cache.attend(mixed, [(1, 0, 5), (0, start, rows), (2, 0, 129), (3, 39, 1)])
            assert torch.equal(out[5 : 5 + rows], whole[start : start + rows])
    finally:
        torch.set_num_threads(1)


def test_what_other_sequences_left_behind_does_not_matter() -> None:
    """The last block of a sequence and free blocks may hold anything, NaN included."""
    cache = Cache([35], 2, 64)
    q = torch.randn(35, 4, 64)
    before = cache.attend(q, [(0, 0, 35)])
    assert before.isfinite().all()
    last = cache.blocks[0][-1]
    cache.keys[last, :, 35 % BLOCK :], cache.values[last, :, 35 % BLOCK :] = 1e30, -1e30
    assert torch.equal(cache.attend(q, [(0, 0, 35)]), before)
    assert torch.equal(cache.attend(q[34:], [(0, 34, 1)]), before[34:])
