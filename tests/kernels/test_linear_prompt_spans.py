"""Spans of columns that are decoded at a time for long prompts: the cheapest ones, each decoded and then multiplied where it lies."""

import functools
from typing import Any

import pytest
import torch

from espalier.kernels.counters import Scratch
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.linear.group import LinearGroup, Run
from espalier.kernels.linear.prompt_spans import ROUND_COSTS, SPAN_COST, choose_spans
from tests.support.sass import needs_triton


def rounds_cost(blocks: int, tokens: int, rows: int, programs: int) -> int:
    return -(-blocks * -(-rows // tokens) // programs) * ROUND_COSTS[tokens]


@pytest.mark.parametrize(("rows", "programs"), [(1, 132), (300, 5), (1536, 132), (2048, 132), (8192, 132), (8192, 20)])
@pytest.mark.parametrize(("blocks", "most"), [(1, 51), (7, 1), (40, 15), (40, 42), (136, 51)])
def test_spans_are_the_cheapest_that_cover_the_columns(blocks: int, most: int, rows: int, programs: int) -> None:
    @functools.cache
    def least(left: int) -> int:
        lengths = range(1, min(most, left) + 1)
        costs = [
            least(left - length) + rounds_cost(length, tokens, rows, programs) + SPAN_COST
            for length in lengths
            for tokens in ROUND_COSTS
        ]
        return min(costs, default=0)

    spans = choose_spans(blocks, rows, most, programs)
    assert sum(length for length, _ in spans) == blocks and all(1 <= length <= most for length, _ in spans)
    assert [tokens for _, tokens in spans] == sorted((tokens for _, tokens in spans), reverse=True)
    assert sum(rounds_cost(*span, rows, programs) + SPAN_COST for span in spans) == least(blocks)


def test_narrower_tiles_instead_of_a_round_that_most_programs_miss() -> None:
    # Four shapes of a 27B model (column blocks, most of them in a span) -> percent of the programs' time that is idle.
    shapes = {"A": (136, 51), "B": (40, 15), "C": (40, 42), "D": (96, 51)}
    assert choose_spans(40, 2048, 42, 132) == ((24, 192), (16, 128))  # 440 wide tiles would be 3.3 rounds
    assert choose_spans(40, 2048, 15, 132) == ((12, 192), (12, 192), (8, 128), (8, 128))
    assert choose_spans(136, 2048, 51, 132) == ((48, 192), (48, 192), (24, 192), (16, 128))
    assert choose_spans(96, 2048, 51, 132) == ((48, 192), (48, 192))  # eight rounds
    idle = {}
    for name, (blocks, most) in shapes.items():
        for rows in (1536, 2048, 4096, 8192):
            taken = sum(rounds_cost(*span, rows, 132) for span in choose_spans(blocks, rows, most, 132))
            idle[name, rows] = round(100 - 100 * 100 * rows / 192 * blocks / 132 / taken)
    assert {name: [idle[name, rows] for rows in (1536, 2048, 4096, 8192)] for name in shapes} == {
        "A": [2, 4, 3, 2],
        "B": [11, 5, 4, 4],
        "C": [11, 5, 4, 4],
        "D": [3, 3, 3, 1],
    }


@needs_triton
def test_spans_cover_the_columns_and_fit_the_scratch() -> None:
    from espalier.kernels.linear import prompt_decoded

    runs = tuple(
        Run(first, columns, 4.0, Codebook.MUL1, torch.empty(0)) for first, columns in ((0, 17408), (17408, 128))
    )
    nothing = torch.empty(0)
    for in_features in (640, 5120, 17408, 1 << 20):
        group = LinearGroup(in_features, (17408, 128), runs, nothing, nothing, None)
        size = prompt_decoded.scratch_size(in_features, group.widths, 2048)
        for rows in (1, 2048, 8192):
            found = prompt_decoded.spans(group, rows, 132)
            columns = [
                span.run.first_column // 128 + block
                for span in found
                for block in range(span.first_block, span.first_block + span.blocks)
            ]
            assert columns == list(range(137))
            assert all(2 * size.partials >= span.blocks * 128 * in_features for span in found)


class Recorder:
    """In a kernel's place: what it is launched with, by name."""

    def __init__(self, kernel: Any, launches: list[dict[str, Any]]) -> None:
        self.names, self.launches = kernel.arg_names, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self.launches.append(
            {"grid": grid} | dict(zip(self.names, args, strict=False)) | options
        )


@needs_triton
def test_a_span_is_decoded_and_then_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    from espalier.kernels.linear import decode_weights, prompt_decoded

    launches: list[dict[str, Any]] = []
    for module, name in ((decode_weights, "decode_weights"), (prompt_decoded, "prompt_decoded")):
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), launches))
    monkeypatch.setattr(prompt_decoded, "SPAN_WEIGHTS", 6 * 640 * 128)
    words, bias = [torch.zeros(1, dtype=torch.int32) for _ in range(2)], torch.zeros(1792)
    runs = (Run(0, 1280, 4.0, Codebook.MUL1, words[0]), Run(1280, 512, 3.5, Codebook.MCG, words[1]))
    group = LinearGroup(640, (1280, 512), runs, torch.zeros(2, 640), torch.zeros(1792).half(), bias)
    scratch = Scratch(
        torch.zeros(0, dtype=torch.int32), torch.zeros(prompt_decoded.scratch_size(640, group.widths, 2048).partials)
    )
    out = torch.zeros(2048, 1792)
    for span in prompt_decoded.spans(group, 2048, 20):
        prompt_decoded.launch_span(torch.zeros(2, 2048, 640).half(), group, span, out, scratch, 20)
    multiplied: list[int] = []
    for decoded, product in zip(launches[::2], launches[1::2], strict=True):
        first, blocks = product["first_block"], product["NB"]
        run = runs[0] if first < 10 else runs[1]
        assert decoded["words"] is run.words
        assert (run.first_column // 128 + decoded["first_block"], decoded["blocks"]) == (first, blocks)
        assert (decoded["RATE2"], decoded["CODEBOOK"]) == (2 * run.rate, run.codebook.number)
        weights = decoded["weights"]
        assert weights.shape == (10 * 128 * blocks, 64) and weights.data_ptr() == scratch.partials.data_ptr()
        assert product["weights"].base is weights and product["x"].base.shape == (2 * 2048, 640)
        for name, whole in (("svh", group.svh), ("bias", bias), ("out", out.t())):
            assert product[name].data_ptr() == whole[128 * first :].data_ptr()
        tiles = -(-2048 // product["tokens"]) * blocks
        assert (product["T"], product["blocks"], product["grid"]) == (2048, 5, (min(tiles, 20),))
        multiplied += range(first, first + blocks)
    assert multiplied == list(range(14))
