"""Packing of sampling parameters: what a line holds, and what is refused."""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from espalier.kernels.sampling.rows import Kind, Limits, Needs, Row, Word, pack_rows

LIMITS = Limits(1000, max_biases=3, max_banned=2)


def word(row: Row, column: Word, limits: Limits = LIMITS) -> int:
    return int(pack_rows([row], limits)[0, column])


def number(row: Row, column: Word) -> float:
    return float(pack_rows([row], LIMITS)[0, column].view(torch.float32))


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (Row(temperature=0.0, top_k=5, top_p=0.5), Kind.GREEDY),
        (Row(), Kind.PLAIN),
        (Row(min_p=0.5), Kind.PLAIN),
        (Row(top_k=1000), Kind.PLAIN),
        (Row(top_k=1), Kind.SHORT),
        (Row(top_k=256, top_p=0.5), Kind.SHORT),
        (Row(top_k=257), Kind.LONG),
        (Row(top_p=0.5), Kind.LONG),
        (Row(top_k=2000, top_p=0.5), Kind.LONG),
    ],
)
def test_kinds(row: Row, kind: Kind) -> None:
    assert word(row, Word.KIND) == kind


def test_filters_that_keep_everything_are_off() -> None:
    assert word(Row(top_k=999), Word.TOP_K) == 999
    assert word(Row(top_k=1000), Word.TOP_K) == word(Row(top_k=2**31 - 1), Word.TOP_K) == 0
    assert word(Row(top_p=1.0), Word.SHARE) == 0
    assert word(Row(top_p=1 - 2**-40), Word.SHARE) == 2**30  # on: tokens without weight are left out
    assert word(Row(top_p=1e-12), Word.SHARE) == 1


@given(min_p=st.floats(0.0, 1.0))
def test_an_fp32_weight_reaches_the_least_weight_exactly_when_it_should(min_p: float) -> None:
    enough = math.ceil(Fraction(min_p) * 2**40)
    least = number(Row(min_p=min_p), Word.MIN_WEIGHT)
    below = float(torch.nextafter(torch.tensor(least), torch.tensor(-1.0)))
    assert least >= enough > below


def test_numbers_are_rounded_as_the_reference_rounds_them() -> None:
    assert number(Row(temperature=0.7), Word.TEMPERATURE) == float(torch.tensor(0.7))
    assert number(Row(temperature=1e-300), Word.TEMPERATURE) == 2.0**-64
    assert number(Row(frequency=-0.1), Word.FREQUENCY) == float(torch.tensor(-0.1))


def test_edited_rows_are_marked() -> None:
    assert word(Row(), Word.EDITED) == 0
    assert word(Row(banned=(1000, 5000)), Word.EDITED) == 0  # no token of this model
    for row in (Row(banned=(999,)), Row(biases=((0, 1.0),)), Row(presence=0.1)):
        assert word(row, Word.EDITED) == 1
    assert word(Row(biases=((0, 1.0),)), Word.PENALIZED) == 0


def test_lists_and_seeds_lie_where_kernels_look() -> None:
    row = Row(biases=((7, 0.5), (3, -2.0)), banned=(9, 1001), seed=2**64 - 2)
    line = pack_rows([Row(), row], LIMITS)[1]
    assert line.shape == (LIMITS.width,) == (16 + 3 + 3 + 2,)
    assert line[16:18].tolist() == [7, 3]
    assert line[19:21].view(torch.float32).tolist() == [0.5, -2.0]
    assert line[22] == 9
    assert (line[Word.NUM_BIASES], line[Word.NUM_BANNED]) == (2, 1)
    assert (line[Word.SEED_LOW], line[Word.SEED_HIGH]) == (-2, -1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition", 0.0),
        ("presence", math.inf),
        ("frequency", math.nan),
        ("biases", ((1000, 1.0),)),
        ("biases", ((-1, 1.0),)),
        ("biases", ((1, 1.0), (1, 2.0))),
        ("biases", ((1, math.nan),)),
        ("biases", tuple((i, 1.0) for i in range(4))),
        ("banned", (-1,)),
        ("banned", (1, 2, 3)),
        ("banned_before", -1),
        ("num_top", 21),
        ("num_top", -1),
        ("seed", 2**64),
        ("seed", -1),
    ],
)
def test_numbers_without_a_meaning_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        pack_rows([replace(Row(), **{field: value})], LIMITS)


@pytest.mark.parametrize("vocab", [0, 2**18 + 1])
def test_vocabularies_that_sums_are_not_made_for_are_refused(vocab: int) -> None:
    with pytest.raises(ValueError, match=r"^vocab: "):
        Limits(vocab)


def test_needs_are_those_of_all_rows() -> None:
    assert Needs.of([Row(temperature=0.0)], LIMITS) == Needs(sifts=False, guesses=False, logprobs=False)
    assert Needs.of([Row(top_k=5), Row()], LIMITS) == Needs(sifts=True, guesses=False, logprobs=False)
    assert Needs.of([Row(top_p=0.5, num_top=0)], LIMITS) == Needs()
