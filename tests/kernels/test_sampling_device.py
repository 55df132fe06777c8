"""The device sampler, interpreted: every result equals that of the sampler in plain torch, bit for bit."""

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from espalier.kernels.counters import Scratch
from espalier.kernels.sampling import reference
from espalier.kernels.sampling.rows import Kind, Limits, Needs, Row, pack_rows
from espalier.replicas.sampling.sampler import TokenHistory
from espalier.replicas.sampling.seeds import row_key as host_row_key
from tests.data.sampling.make_table import TABLE
from tests.support.interpret import interpreted

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from espalier.kernels.sampling import sample as launches  # noqa: E402
from espalier.kernels.sampling.history import empty_history, observe  # noqa: E402
from espalier.kernels.sampling.noise import gumbel, gumbel_ceiling, hash32, row_key  # noqa: E402
from espalier.kernels.sampling.order import rank_key, rank_word, share_of, value_of, weight  # noqa: E402
from espalier.kernels.sampling.sample import Drawn, sample, scratch_size  # noqa: E402
from tests.support.sampling_runs import (  # noqa: E402
    Case,
    Round,
    by_reference,
    golden_case,
    golden_result,
    on_device,
    random_case,
)

GOLDEN = json.loads(TABLE.read_text())


def random_cases(vocab: int, seeds: range) -> list[Case]:
    return [random_case(vocab, seed, "cpu") for seed in seeds]


# Parts


@triton.jit
def _noise(seed_words, positions, token_ids, keys, noise, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0)
    seed = (tl.load(seed_words + 2 * row + 1).to(tl.uint32).to(tl.uint64) << 32) | tl.load(seed_words + 2 * row).to(
        tl.uint32
    ).to(tl.uint64)
    key = row_key(seed, tl.load(positions + row))
    i = tl.arange(0, BLOCK)
    tl.store(keys + row, key.to(tl.int64, bitcast=True))
    tl.store(noise + row * BLOCK + i, gumbel(hash32(key, tl.load(token_ids + i))))


@interpreted
def test_keys_and_noise() -> None:
    seeds = [0, 1, 2**31, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    positions = [0, 1, 977, 2**20, 2**31 - 1, 5, 6]
    words = torch.tensor([[seed & 0xFFFFFFFF, seed >> 32] for seed in seeds]).to(torch.uint32).view(torch.int32)
    ids = torch.cat([torch.arange(4000), torch.arange(2**31 - 96, 2**31)]).to(torch.int32)
    keys = torch.empty(len(seeds), dtype=torch.int64)
    noise = torch.full((len(seeds), len(ids)), math.nan)
    _noise[(len(seeds),)](words, torch.tensor(positions), ids, keys, noise, BLOCK=len(ids), enable_fp_fusion=False)
    for seed, position, key, found in zip(seeds, positions, keys.tolist(), noise, strict=True):
        assert key % 2**64 == host_row_key(seed, position)
        assert torch.equal(found, reference.gumbel(host_row_key(seed, position), ids.long()))


@triton.jit
def _ceilings(hashes, noise, ceilings, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    i = tl.arange(0, BLOCK)
    h = tl.load(hashes + i).to(tl.uint32, bitcast=True)
    tl.store(noise + i, gumbel(h))
    tl.store(ceilings + i, gumbel_ceiling(h))


@interpreted
def test_noise_stays_under_its_ceiling_and_near_it() -> None:
    ends = torch.tensor([0, 1, 2, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, 2**31 + 2, 2**32 - 2, 2**32 - 1])
    powers = torch.cat([2**31 + 2 ** torch.arange(31) + d for d in (-1, 0, 1)])
    tail = 2**31 + torch.randint(0, 2**22, (2**16,))
    hashes = torch.cat([ends, powers, tail, torch.randint(0, 2**32, (2**17 - 2**16 - 103,))])
    noise, ceilings = torch.empty(2, 2**17)
    _ceilings[(1,)](hashes.to(torch.uint32).view(torch.int32), noise, ceilings, BLOCK=2**17, enable_fp_fusion=False)
    assert bool((noise <= ceilings).all())
    in_tail = noise > 5.0
    assert int(in_tail.sum()) > 2**16
    assert float((ceilings - noise)[in_tail].max()) < 0.07
    assert float((ceilings - noise).max()) < 0.2


@triton.jit
def _order(values, keys, back, weights, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    i = tl.arange(0, BLOCK)
    x = tl.load(values + i, mask=i < n, other=0.0)
    key = rank_key(rank_word(x), i)
    tl.store(keys + i, key, mask=i < n)
    tl.store(back + i, value_of(key), mask=i < n)
    tl.store(weights + i, weight(tl.minimum(x, 0.0)).to(tl.int64), mask=i < n)


@interpreted
def test_rank_keys_sort_as_the_order_does_and_weights_are_the_references() -> None:
    values = torch.cat([torch.randn(900) * 9, torch.zeros(20), -torch.zeros(20), torch.linspace(-30, 0, 60)])
    values = torch.cat([values, torch.tensor([math.inf, -math.inf, -math.inf, 1e-42, -1e-42, 3e38, -3e38])])
    n = len(values)
    keys, back, weights = (torch.empty(n, dtype=dtype) for dtype in (torch.int64, torch.float32, torch.int64))
    _order[(1,)](values, keys, back, weights, n, BLOCK=1024, enable_fp_fusion=False)
    assert keys.argsort().tolist() == sorted(range(n), key=lambda i: (-float(values[i]), i))
    assert back.tolist() == values.tolist()
    assert torch.equal(weights, reference.weights(values.clamp(max=0.0)))


@triton.jit
def _share(shares, totals, found):  # type: ignore[no-untyped-def]
    i = tl.program_id(0)
    tl.store(found + i, share_of(tl.load(shares + i), tl.load(totals + i)))


@interpreted
def test_shares_are_exact() -> None:
    pairs = [(p, t) for p in (1, 2**29 + 1, 2**30 - 1, 2**30) for t in (0, 1, 2**30 - 1, 2**40 + 12345, 2**58 - 1)]
    shares = torch.tensor([p for p, _ in pairs], dtype=torch.int32)
    totals, found = torch.tensor([t for _, t in pairs]), torch.empty(len(pairs), dtype=torch.int64)
    _share[(len(pairs),)](shares, totals, found)
    assert found.tolist() == [-(-p * t >> 30) for p, t in pairs]


# Rows


@pytest.mark.parametrize("vocab", sorted({case["vocab"] for case in GOLDEN["cases"] if case["vocab"] <= 1000}))
@interpreted
def test_golden_rows(vocab: int) -> None:
    cases = [case for case in GOLDEN["cases"] if case["vocab"] == vocab]
    found = on_device([golden_case(case, "cpu") for case in cases])
    assert [golden_result(result) for result in found] == [case["result"] for case in cases]


@pytest.mark.parametrize(
    ("vocab", "seeds"),
    [(1, range(8)), (2, range(8)), (127, range(8)), (128, range(8, 16)), (129, range(16, 24)), (1500, range(24, 28))],
)
@interpreted
def test_rows_of_any_parameters(vocab: int, seeds: range) -> None:
    cases = random_cases(vocab, seeds)
    assert on_device(cases) == [by_reference(case) for case in cases]


@pytest.mark.parametrize("kind", Kind)
@interpreted
def test_each_kind_of_row_where_everything_ties(kind: Kind) -> None:
    row = {
        Kind.GREEDY: Row(temperature=0.0, num_top=3),
        Kind.PLAIN: Row(min_p=1.0),
        Kind.SHORT: Row(top_k=40, top_p=0.51, num_top=20),
        Kind.LONG: Row(top_k=300, top_p=0.3),
    }[kind]
    cases = [
        Case(torch.zeros(700), replace(row, seed=seed), 3, torch.zeros(700, dtype=torch.int32)) for seed in range(3)
    ]
    assert on_device(cases) == [by_reference(case) for case in cases]


@interpreted
def test_lists_longer_than_a_program_holds() -> None:
    logits = (torch.arange(4500) % 2).float()
    seen = torch.zeros(4500, dtype=torch.int32)
    rows = [Row(top_p=0.9, seed=1), Row(top_k=4400, temperature=100.0, seed=2), Row(top_k=200, num_top=20, seed=3)]
    cases = [Case(logits, row, 3, seen) for row in rows]
    assert on_device(cases) == [by_reference(case) for case in cases]


class Guess:
    """Stands for the kernel that guesses where a prefix ends; guesses what it was told."""

    def __init__(self, upper: float, lower: float) -> None:
        self.ends = torch.tensor([upper, lower])
        self.place = list(inspect.signature(launches.guess_kernel.fn).parameters).index("ends")

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            args[self.place][: 2 * grid[0]].view(-1, 2).copy_(self.ends)

        return launch


@pytest.mark.parametrize(
    "ends", [(math.inf, -math.inf), (-math.inf, -math.inf), (math.inf, 1.0), (-0.5, -0.5), (-3.0, -4.0)]
)
@interpreted
def test_a_guess_decides_about_time_alone(ends: tuple[float, float]) -> None:
    logits = torch.randn(600, generator=torch.Generator().manual_seed(1))
    seen = torch.zeros(600, dtype=torch.int32)
    rows = [Row(top_p=0.9, seed=1), Row(top_k=300, seed=2), Row(top_k=300, top_p=0.5, min_p=0.02, seed=3)]
    cases = [Case(logits, row, 3, seen) for row in rows]
    right = launches.guess_kernel
    launches.guess_kernel = Guess(*ends)
    try:
        found = on_device(cases)
    finally:
        launches.guess_kernel = right
    assert found == [by_reference(case) for case in cases]


@interpreted
def test_a_rows_result_does_not_depend_on_its_neighbours_or_on_passes_it_does_not_need() -> None:
    cases = random_cases(70, range(50, 58))
    together = on_device(cases)
    assert [on_device([case])[0] for case in cases] == together
    assert on_device(cases[::-1], Needs())[::-1] == together


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@interpreted
def test_narrow_logits_are_widened(dtype: torch.dtype) -> None:
    cases = random_cases(130, range(70, 73))
    round_ = Round(cases, dtype=dtype)
    round_.run()
    widened = [replace(case, logits=case.logits.to(dtype).float()) for case in cases]
    assert round_.results() == [by_reference(case) for case in widened]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@interpreted
def test_scores_without_a_finite_maximum_fail_their_row_alone(bad: float) -> None:
    good = random_case(300, 3, "cpu")
    logits = torch.full((300,), -math.inf)
    logits[200] = bad
    rows = [Row(temperature=0.0, num_top=2), Row(), Row(top_k=3), Row(top_p=0.5, presence=0.1), Row(top_p=0.5)]
    cases = [replace(good, logits=logits, row=row) for row in rows]
    found = on_device([*cases, good])
    assert [(result.failed, result.token_id) for result in found[:-1]] == [(True, 0)] * len(rows)
    assert found[-1] == by_reference(good)


@interpreted
def test_a_banned_nan_is_no_failure() -> None:
    logits = torch.arange(10.0)
    logits[4] = math.nan
    case = Case(logits, Row(temperature=0.0, banned=(4, 9)), 0, torch.zeros(10, dtype=torch.int32))
    assert on_device([case])[0] == by_reference(case)
    assert on_device([case])[0].token_id == 8


@interpreted
def test_bans_end_at_their_position() -> None:
    case = Case(
        torch.arange(5.0), Row(temperature=0.0, banned=(4,), banned_before=7), 6, torch.zeros(5, dtype=torch.int32)
    )
    assert [on_device([replace(case, position=p)])[0].token_id for p in (0, 6, 7, 8)] == [3, 3, 4, 4]


@interpreted
def test_rows_name_their_lanes_and_padding_is_left_alone() -> None:
    cases = random_cases(200, range(80, 84))
    round_ = Round(cases, Needs())
    order = [2, 0, 2]
    round_.lanes = torch.tensor([2, -1, 0, -1, 2], dtype=torch.int32)
    round_.logits = torch.stack([cases[i].logits for i in (2, 2, 0, 0, 2)])
    round_.positions = torch.tensor([cases[i].position for i in (2, 2, 0, 0, 2)])
    size = scratch_size(5, round_.limits)
    round_.scratch = Scratch(torch.zeros(size.counters, dtype=torch.int32), torch.full((size.partials,), math.nan))
    round_.out = Drawn.empty(5, "cpu")
    round_.num_top = [cases[i].row.num_top for i in (2, 2, 0, 0, 2)]
    round_.poison()
    round_.run()
    expected = [by_reference(cases[i]).token_id for i in order]
    assert round_.out.token_ids.tolist() == [expected[0], -77, expected[1], -77, expected[2]]
    assert round_.out.status[1] == round_.out.status[3] == -77


def test_what_cannot_be_sampled_is_refused_by_name() -> None:
    limits = Limits(10)
    logits, lanes, positions = torch.zeros(2, 10), torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    table, seen = pack_rows([Row()], limits), torch.zeros(1, 10, dtype=torch.int32)
    out, none = Drawn.empty(2, "cpu"), Scratch(torch.zeros(0, dtype=torch.int32), torch.zeros(0))
    for name, wrong in (
        ("logits", (torch.zeros(2, 11), lanes, positions, table, seen)),
        ("logits", (logits.double(), lanes, positions, table, seen)),
        ("logits", (torch.zeros(10, 2).t(), lanes, positions, table, seen)),
        ("lanes", (logits, lanes.long(), positions, table, seen)),
        ("positions", (logits, lanes, positions[:1], table, seen)),
        ("table", (logits, lanes, positions, table[:, :-1], seen)),
        ("seen", (logits, lanes, positions, table, seen.bool())),
    ):
        with pytest.raises(ValueError, match=f"^{name}"):
            sample(*wrong, limits, out, none)
    with pytest.raises(AssertionError):
        sample(logits, lanes, positions, table, seen, limits, out, none)


# History


@interpreted
def test_history_on_the_device_is_the_hosts() -> None:
    vocab, lanes = 50, 3
    seen = empty_history(lanes, vocab, "cpu")
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab, (lanes, 200), generator=generator, dtype=torch.int32)
    prompt_lens = torch.tensor([0, 60, 500])
    for start, end in ((0, 1), (1, 1), (1, 130), (130, 200)):
        cut = tokens[:, start:end]
        observe(
            cut.contiguous().flatten(),
            torch.arange(lanes, dtype=torch.int32).repeat_interleave(end - start),
            torch.arange(start, end).repeat(lanes),
            prompt_lens,
            seen,
        )
    observe(tokens[0, :5], torch.full((5,), -1, dtype=torch.int32), torch.arange(5), prompt_lens, seen)
    for lane in range(lanes):
        history = TokenHistory(vocab)
        history.observe(0, tokens[lane].tolist(), int(prompt_lens[lane]))
        assert torch.equal(seen[lane] & 1 == 1, history.in_prompt)
        assert torch.equal(seen[lane] >> 1, history.output_counts)


@interpreted
def test_a_reply_drawn_and_observed_on_the_device_is_the_references() -> None:
    vocab, prompt = 40, [3, 4, 5, 3]
    row = Row(repetition=1.4, presence=0.5, frequency=0.3, top_k=20, seed=9, banned=(0,), banned_before=len(prompt) + 3)
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(12, vocab, generator=generator)
    round_ = Round([Case(logits[0], row, len(prompt), torch.zeros(vocab, dtype=torch.int32))])
    lanes, prompt_lens = torch.zeros(1, dtype=torch.int32), torch.tensor([len(prompt)])
    observe(torch.tensor(prompt, dtype=torch.int32), lanes.repeat(4), torch.arange(4), prompt_lens, round_.seen)
    drawn: list[int] = []
    for step_logits in logits:
        round_.logits = step_logits[None]
        history = TokenHistory(vocab)
        history.observe(0, prompt + drawn, len(prompt))
        seen = history.output_counts * 2 + history.in_prompt.int()
        expected = by_reference(Case(step_logits, row, len(prompt) + len(drawn), seen))
        round_.run()
        observe(round_.out.token_ids, lanes, round_.positions, prompt_lens, round_.seen)
        round_.positions += 1
        assert round_.results() == [expected]
        drawn.append(expected.token_id)
    assert len(set(drawn)) > 5


@interpreted
def test_drafts_before_a_row_count_as_its_reply() -> None:
    vocab, base = 40, random_case(40, 4, "cpu")
    row = Row(repetition=1.4, presence=0.5, frequency=0.3, seed=9, num_top=4)
    drafts = [7, 3, 7]
    seen = torch.zeros(vocab, dtype=torch.int32)
    seen[3] = 5
    cases, after = [], seen
    for i, draft in enumerate([*drafts, -1]):
        cases.append(Case(base.logits, row, 20 + i, after))
        after = after.clone()
        after[draft] += 2
    round_ = Round([replace(case, seen=seen) for case in cases])
    round_.pending = torch.tensor([[-1, -1, -1], [7, -1, -1], [7, 3, -1], [7, 3, 7]], dtype=torch.int32)
    round_.run()
    assert round_.results() == [by_reference(case) for case in cases]
