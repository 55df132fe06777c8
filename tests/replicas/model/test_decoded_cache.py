"""The file of decoded weights: made once, shared, never trusted when damaged, written by one process at a time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.model.decoded_cache import Decoded, open_decoded

SHAPES = {"a": (3, 5, 7), "b": (2, 1000, 3), "c": (1,)}


class Filler:
    """Writes a constant for each name and counts how often it was asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, name: str, out: torch.Tensor) -> None:
        self.calls.append(name)
        out.fill_(float(ord(name)))


def values(decoded: Decoded) -> dict[str, float]:
    assert {name: tuple(array.shape) for name, array in decoded.arrays.items()} == SHAPES
    return {name: array.unique().item() for name, array in decoded.arrays.items()}


EXPECTED = {name: float(ord(name)) for name in SHAPES}


def test_the_second_opening_decodes_nothing(tmp_path: Path) -> None:
    first, second = Filler(), Filler()
    assert values(open_decoded(tmp_path, "m", "k", SHAPES, first)) == EXPECTED
    assert values(open_decoded(tmp_path, "m", "k", SHAPES, second)) == EXPECTED
    assert (first.calls, second.calls) == (["a", "b", "c"], [])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m-k.f32", "m.lock"]


def test_arrays_are_aligned(tmp_path: Path) -> None:
    for array in open_decoded(tmp_path, "m", "k", SHAPES, Filler()).arrays.values():
        assert array.data_ptr() % 64 == 0
        assert array.is_contiguous()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "header"])
def test_a_damaged_file_is_made_again(tmp_path: Path, damage: str) -> None:
    open_decoded(tmp_path, "m", "k", SHAPES, Filler())
    file = tmp_path / "m-k.f32"
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[-5000] ^= 4
    elif damage == "header":
        content[3] ^= 1
    file.write_bytes(content[: {"truncated": -1, "empty": 0}.get(damage, len(content))])
    again = Filler()
    assert values(open_decoded(tmp_path, "m", "k", SHAPES, again)) == EXPECTED
    assert again.calls == ["a", "b", "c"]


def test_other_keys_and_shapes_are_other_files(tmp_path: Path) -> None:
    open_decoded(tmp_path, "m", "k", SHAPES, Filler())
    open_decoded(tmp_path, "other", "k", SHAPES, Filler())
    changed = Filler()
    open_decoded(tmp_path, "m", "k2", SHAPES, changed)
    assert changed.calls
    # The file of the key that is no more is gone, another model's is not.
    assert sorted(file.name for file in tmp_path.glob("*.f32")) == ["m-k2.f32", "other-k.f32"]
    reshaped = Filler()
    open_decoded(tmp_path, "m", "k2", {**SHAPES, "a": (3, 7, 5)}, reshaped)
    assert reshaped.calls


def test_a_failed_fill_leaves_nothing(tmp_path: Path) -> None:
    def fails(name: str, out: torch.Tensor) -> None:
        raise RuntimeError(name)

    with pytest.raises(RuntimeError):
        open_decoded(tmp_path, "m", "k", SHAPES, fails)
    assert [file.name for file in tmp_path.iterdir()] == ["m.lock"]


def test_a_write_by_a_process_stays_in_it(tmp_path: Path) -> None:
    decoded = open_decoded(tmp_path, "m", "k", SHAPES, Filler())
    decoded.arrays["a"].zero_()
    again = Filler()
    reopened = open_decoded(tmp_path, "m", "k", SHAPES, again)
    assert values(reopened) == EXPECTED
    assert reopened.crc32 == decoded.crc32
    assert not again.calls


def test_of_two_that_start_at_once_one_decodes(tmp_path: Path) -> None:
    """Threads stand in for processes: a file lock belongs to an opened file, of which each call has its own."""
    start, fillers = threading.Barrier(2), [Filler(), Filler()]

    def run(filler: Filler) -> dict[str, float]:
        start.wait(timeout=60)
        return values(open_decoded(tmp_path, "m", "k", SHAPES, filler))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, fillers)) == [EXPECTED, EXPECTED]
    assert sorted(len(filler.calls) for filler in fillers) == [0, 3]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequestError, match="m-k") as caught:
        open_decoded(tmp_path / "file", "m", "k", SHAPES, Filler())
    assert caught.value.param == "cache_dir"
