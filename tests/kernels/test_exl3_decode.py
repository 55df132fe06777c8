"""The fast decode without a GPU: its recipes run on NumPy words here, lane by lane; the compiled code is counted elsewhere."""

import itertools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from espalier.kernels.exl3.layout import RATES, unpack_states
from espalier.kernels.exl3.pack import PLANES, pack_trellis
from tests.kernels.test_exl3_pack import random_trellis

pytest.importorskip("triton")
from espalier.kernels.exl3 import decode, decode_windows

Words = npt.NDArray[np.uint32]  # [32], one a lane


def prmt(a: Words, b: Words, *select: int) -> Words:
    both = [a >> 8 * i & 0xFF for i in range(4)] + [b >> 8 * i & 0xFF for i in range(4)]
    result: Words = np.zeros(32, np.uint32)
    for byte in select:
        result = (result << 8 | both[byte]).astype(np.uint32)
    return result


def funnel(low: Words, high: Words, shift: int) -> Words:
    return ((high.astype(np.uint64) << 32 | low) >> np.uint64(shift)).astype(np.uint32)


def two(a: Words, byte: int) -> Words:
    assert 0 <= byte <= 2
    return (a >> 8 * byte & 0xFFFF).astype(np.uint32)


def on_numpy() -> Callable[..., tuple[Words, ...]]:
    """`windows` with its instructions as NumPy operations."""
    names: dict[str, Any] = {
        "_bytes": prmt,
        "_right": funnel,
        "_shr": lambda a, shift: a >> shift,
        "_two": two,
        "gl": types.SimpleNamespace(static_assert=lambda condition: None),
    }
    for name in ("_low_half", "_window", "windows"):
        names[name] = types.FunctionType(getattr(decode_windows, name).fn.__code__, names)
    windows: Callable[..., tuple[Words, ...]] = names["windows"]
    return windows


def sizes(rate: float) -> list[int]:
    """Half bytes of a lane's field of one tile in each plane, or their average."""
    return [sum(count for _, _, count in plane) // 4 for plane in PLANES[rate]]


def packed_words(block: np.ndarray, rate: float) -> list[Words]:
    """What `load_words` loads of one block, int32 [32 * rate]."""
    planes, start = [], 0
    data = block.tobytes()
    for nibbles in sizes(rate):
        part = data[start : start + 64 * nibbles]
        start += 64 * nibbles
        words = np.frombuffer(part, np.uint16 if nibbles == 1 else np.uint32).astype(np.uint32)
        planes.append(words.reshape(32, -1).T)
    loaded = [*planes, np.roll(planes[0], 1, axis=1)]
    if rate in (1.5, 3.5):
        loaded.append(np.roll(planes[1], 1, axis=1))
    if rate < 2:
        loaded.append(np.roll(planes[0], 2, axis=1))
    return [words for plane in loaded for words in plane]


@pytest.mark.parametrize("rate", RATES)
def test_every_rates_recipe_finds_its_windows(rate: float) -> None:
    trellis = random_trellis(rate)
    states = unpack_states(trellis)[4:, 1].numpy().reshape(4, 32, 8)
    words = packed_words(pack_trellis(trellis)[1, 1].numpy(), rate)
    windows = on_numpy()
    for tile, spare in itertools.product(range(4), (False, True)):
        found = windows(tuple(words), int(2 * rate), tile, spare)
        assert [w.dtype for w in found] == [np.dtype(np.uint32)] * 8
        assert np.array_equal(np.stack(found, axis=1), states[tile]), tile


@pytest.mark.parametrize("rate", RATES)
def test_planes_are_the_packers(rate: float) -> None:
    planes = decode._planes.fn(int(2 * rate))
    assert [size for _, size in planes] == sizes(rate)
    assert [start for start, _ in planes] == [16 * sum(sizes(rate)[:i]) for i in range(len(planes))]
