"""Packed inputs of a round: fields lie apart, padding is nothing, and the lists of attention's work are those of the packed lanes."""

import numpy as np

from espalier.kernels.attention.work import decode_shares, prompt_tiles
from espalier.replicas.gpu.inputs import DECODE_ROWS, InputFields
from espalier.replicas.gpu.rounds import RoundShape

GROUP = 4
MIXED = RoundShape(mixed=True, greedy=False, rows=64, lanes=8, samples=8, context=1024)
DECODE = RoundShape(mixed=False, greedy=True, rows=8, lanes=8, samples=8, context=1024)


def test_fields_lie_apart_and_aligned() -> None:
    for shape in (MIXED, DECODE):
        fields = InputFields.of(shape, GROUP)
        words = np.zeros(fields.num_words, dtype=np.int32)
        for name, (first, _) in fields.offsets.items():
            assert first % 4 == 0, name
            fields.host(words, name)[:] += 1
        assert words.max() == 1
    assert fields.host(words, "tiles").size == fields.host(words, "shares").size == 0


def test_padding_has_no_tiles() -> None:
    fields = InputFields.of(MIXED, GROUP)
    assert (fields.host(fields.padding(), "tiles") == -1).all()
    assert (fields.host(fields.padding(), "shares") == 0).all()


def test_work_is_that_of_the_lanes() -> None:
    fields = InputFields.of(MIXED, GROUP)
    words = fields.padding()
    num_rows, start = fields.host(words, "num_rows"), fields.host(words, "start")
    num_rows[:4], start[:4] = (1, 33, 29, 1), (700, 0, 512, 3)
    before = words.copy()
    fields.share_out(words)
    tiles = fields.host(words, "tiles").reshape(-1, 2)
    assert tiles[:3].tolist() == prompt_tiles(num_rows, start, GROUP, DECODE_ROWS).tolist()
    assert sorted(tiles[:3].tolist()) == [[1, 0], [1, 1], [2, 0]]
    assert (tiles[3:] == -1).all()
    shares = fields.host(words, "shares").reshape(-1, 3)
    assert shares.tolist() == decode_shares(num_rows, start, DECODE_ROWS).tolist()
    assert set(shares[:, 0]) == {0, 3}
    for name in set(fields.offsets) - {"tiles", "shares"}:
        assert (fields.host(words, name) == fields.host(before, name)).all(), name


def test_every_round_has_room() -> None:
    """As many prompts as fit, each of two rows, and one of all rows."""
    fields = InputFields.of(MIXED, 7)
    for counts in ([2] * 8, [64], [19] * 3, [10] * 6, [2] * 7 + [50]):
        words = fields.padding()
        fields.host(words, "num_rows")[: len(counts)] = counts
        fields.share_out(words)
        wanted = sum(-(-count * 7 // 128) for count in counts)
        assert (fields.host(words, "tiles").reshape(-1, 2)[:, 0] >= 0).sum() == wanted
