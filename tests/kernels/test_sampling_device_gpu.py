"""The device sampler on a GPU, over whole vocabularies: bit for bit the sampler in plain torch, in any company, eager or captured."""

import json
import math
from dataclasses import replace

import pytest
import torch

from espalier.kernels.sampling.rows import Needs, Row
from espalier.replicas.sampling.sampler import TokenHistory
from tests.data.sampling.make_table import TABLE

pytest.importorskip("triton")

from espalier.kernels.sampling.history import observe
from tests.support.sampling_runs import (
    Case,
    Result,
    Round,
    by_reference,
    golden_case,
    golden_result,
    on_device,
    random_case,
)

pytestmark = pytest.mark.gpu
GOLDEN = json.loads(TABLE.read_text())["cases"]


def captured(round_: Round) -> torch.cuda.CUDAGraph:
    """A graph of the round, which has run before."""
    round_.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        round_.run()
    return graph


@pytest.mark.parametrize("vocab", sorted({case["vocab"] for case in GOLDEN}))
def test_golden_rows(vocab: int) -> None:
    cases = [case for case in GOLDEN if case["vocab"] == vocab]
    found = on_device([golden_case(case, "cuda") for case in cases])
    assert [golden_result(result) for result in found] == [case["result"] for case in cases]


@pytest.mark.parametrize(
    ("vocab", "seeds"),
    [
        (1, range(100, 140)),
        (2, range(100, 140)),
        (127, range(100, 160)),
        (128, range(100, 160)),
        (129, range(100, 160)),
        (9000, range(100, 200)),
        (32_000, range(200, 400)),
        (151_936, range(400, 500)),
        (248_320, range(500, 600)),
        (262_144, range(600, 630)),
    ],
)
def test_rows_of_any_parameters(vocab: int, seeds: range) -> None:
    cases = [random_case(vocab, seed, "cuda") for seed in seeds]
    round_ = Round(cases)
    round_.run()
    together = round_.results()
    assert together == [by_reference(case) for case in cases]
    # Alone; again; and replayed, with passes that no row needs, over poisoned scratch and outputs.
    assert [on_device([case])[0] for case in cases[:30]] == together[:30]
    round_.needs = Needs()
    graph = captured(round_)
    for _ in range(2):
        round_.poison()
        graph.replay()
        assert round_.results() == together


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_logits_are_widened(dtype: torch.dtype) -> None:
    cases = [random_case(151_936, seed, "cuda") for seed in range(40)]
    round_ = Round(cases, dtype=dtype)
    round_.run()
    widened = [replace(case, logits=case.logits.to(dtype).float()) for case in cases]
    assert round_.results() == [by_reference(case) for case in widened]


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 3.0])
@pytest.mark.parametrize("outlier", [0.0, 30.0])
def test_long_prefixes_wherever_they_end(spread: float, outlier: float) -> None:
    vocab = 248_320
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * spread
    logits[77_777] += outlier
    logits = logits.cuda()
    seen = torch.zeros(vocab, dtype=torch.int32, device="cuda")
    rows = [Row(top_p=top_p, seed=3) for top_p in (1e-6, 0.01, 0.5, 0.9, 0.95, 0.99, 0.99999, 1 - 2**-40)]
    rows += [Row(top_k=top_k, seed=4) for top_k in (257, 5000, 100_000, vocab - 1)]
    rows += [Row(top_k=top_k, top_p=0.9, temperature=0.6, seed=5) for top_k in (300, 30_000, vocab - 1)]
    cases = [Case(logits, row, 11, seen) for row in rows]
    assert on_device(cases) == [by_reference(case) for case in cases]


def test_a_draw_can_be_any_token() -> None:
    # All noise of 64 rows, compared where every token counts: equal scores.
    vocab = 248_320
    seen = torch.zeros(vocab, dtype=torch.int32, device="cuda")
    cases = [Case(torch.zeros(vocab, device="cuda"), Row(seed=seed), seed, seen) for seed in range(64)]
    found = on_device(cases)
    assert found == [by_reference(case) for case in cases]
    assert len({result.token_id for result in found}) > 60


def test_a_reply_in_one_graph_needs_nothing_from_the_host() -> None:
    vocab, prompt, length = 32_000, [3, 4, 5, 3], 24
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(vocab, generator=generator) * 3).cuda()
    row = Row(repetition=1.4, presence=0.5, frequency=0.3, top_k=50, top_p=0.9, seed=9, num_top=3)
    round_ = Round([Case(logits, row, len(prompt), torch.zeros(vocab, dtype=torch.int32, device="cuda"))])
    prompt_lens = torch.tensor([len(prompt)], device="cuda")

    def step() -> None:
        round_.run()
        observe(round_.out.token_ids, round_.lanes, round_.positions, prompt_lens, round_.seen)
        round_.positions += 1

    def begin() -> None:
        round_.seen.zero_()
        round_.positions.fill_(len(prompt))
        ids = torch.tensor(prompt, dtype=torch.int32, device="cuda")
        observe(ids, torch.zeros_like(ids), torch.arange(len(prompt), device="cuda"), prompt_lens, round_.seen)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    begin()
    found: list[Result] = []
    for _ in range(length):
        graph.replay()
        found += round_.results()
    drawn: list[int] = []
    for result in found:
        history = TokenHistory(vocab, "cuda")
        history.observe(0, prompt + drawn, len(prompt))
        seen = history.output_counts * 2 + history.in_prompt.int()
        assert result == by_reference(Case(logits, row, len(prompt) + len(drawn), seen))
        drawn.append(result.token_id)
    assert len(set(drawn)) > length // 2


def test_two_streams_sample_at_once() -> None:
    cases = [random_case(151_936, seed, "cuda") for seed in range(700, 716)]
    rounds = [Round(cases[:8], Needs()), Round(cases[8:], Needs())]
    graphs = [captured(round_) for round_ in rounds]
    expected = [[by_reference(case) for case in part] for part in (cases[:8], cases[8:])]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for round_ in rounds:
        round_.poison()
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert [round_.results() for round_ in rounds] == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_without_a_finite_maximum_fail_their_row_alone(bad: float) -> None:
    good = random_case(151_936, 3, "cuda")
    logits = torch.full_like(good.logits, -math.inf)
    logits[150_000] = bad
    rows = [Row(temperature=0.0, num_top=2), Row(), Row(top_k=3), Row(top_p=0.5, presence=0.1), Row(top_p=0.5)]
    found = on_device([*(replace(good, logits=logits, row=row) for row in rows), good])
    assert found == [Result(0, failed=True)] * len(rows) + [by_reference(good)]
