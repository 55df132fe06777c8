"""Shapes of captured rounds: the smallest that holds a round, and none too small."""

import pytest

from espalier.replicas.gpu.rounds import RoundNeed, RoundShapes

SHAPES = RoundShapes.plan(max_lanes=24, batch_tokens=256, max_context=5000)


def test_sizes() -> None:
    assert SHAPES.decode_rows == (1, 2, 4, 8, 16, 24)
    assert SHAPES.mixed_rows == (16, 32, 64, 128, 256)
    assert SHAPES.contexts == (1024, 4096, 5000)


def test_the_smallest_shape_that_holds_a_round() -> None:
    decode = SHAPES.choose(RoundNeed(num_rows=9, num_lanes=9, num_samples=9, context=1025, greedy=True))
    assert (decode.mixed, decode.greedy, decode.rows, decode.lanes, decode.context) == (False, True, 16, 16, 4096)
    beside = SHAPES.choose(RoundNeed(num_rows=130, num_lanes=9, num_samples=9, context=130, greedy=True))
    assert (beside.mixed, beside.rows, beside.lanes, beside.samples) == (True, 256, 24, 24)
    prompt = SHAPES.choose(RoundNeed(num_rows=130, num_lanes=2, num_samples=1, context=130, greedy=True))
    assert (prompt.mixed, prompt.greedy, prompt.rows, prompt.lanes, prompt.context) == (True, False, 256, 8, 1024)
    assert {decode, beside, prompt} <= set(SHAPES.all())


def test_every_shape_once() -> None:
    shapes = SHAPES.all()
    # Decode: greedy and not. Mixed: few lanes and all of them; 16 rows have no room for more than 16.
    assert len(shapes) == len(set(shapes)) == 3 * (2 * 6 + 2 * 5)
    assert [shape.rows for shape in shapes] == sorted((shape.rows for shape in shapes), reverse=True)
    assert {(shape.rows, shape.lanes) for shape in shapes if shape.mixed and shape.rows < 64} == {
        (16, 8),
        (16, 16),
        (32, 8),
        (32, 24),
    }
    alone = RoundShapes.plan(max_lanes=4, batch_tokens=64, max_context=100)
    assert {shape.lanes for shape in alone.all() if shape.mixed} == {4}


def test_more_than_was_planned_for() -> None:
    with pytest.raises(AssertionError, match="257 is more than 256"):
        SHAPES.choose(RoundNeed(num_rows=257, num_lanes=1, num_samples=1, context=300, greedy=True))
