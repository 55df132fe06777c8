"""Sampling against its golden table, bit for bit, on every device there is."""

import json
from typing import Any

import pytest

from espalier.replicas.sampling.seeds import choice_seed, row_key
from tests.data.sampling.make_table import NOISE_IDS, TABLE, cases, noise_of, result_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GOLDEN = json.loads(TABLE.read_text())


def title(case: dict[str, Any]) -> str:
    return f"{case['vocab']}-{case['salt']}"


def test_the_table_holds_the_cases() -> None:
    assert [{key: value for key, value in case.items() if key != "result"} for case in GOLDEN["cases"]] == cases()
    assert tuple(GOLDEN["noise_ids"]) == NOISE_IDS


def test_keys_and_seeds() -> None:
    assert all(f"{row_key(seed, position):016x}" == key for seed, position, key in GOLDEN["row_keys"])
    assert all(f"{choice_seed(seed, index):016x}" == other for seed, index, other in GOLDEN["choice_seeds"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("key", GOLDEN["noise"])
def test_noise(device: str, key: str) -> None:
    assert noise_of(int(key, 16), device) == GOLDEN["noise"][key]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=title)
def test_rows(device: str, case: dict[str, Any]) -> None:
    assert result_of(case, device) == case["result"]
