"""The split rule: borders cover the inputs, lie on blocks of 128, and depend on the input width alone."""

import itertools

import pytest

from espalier.kernels.linear.splits import BORDER, MAX_SPLITS, num_splits, split_borders

WIDTHS = [*range(128, 8192, 128), 17408, 28672, 55296]


@pytest.mark.parametrize("in_features", WIDTHS)
def test_splits_cover_the_inputs_in_order(in_features: int) -> None:
    borders = split_borders(in_features)
    assert borders[0] == 0
    assert borders[-1] == in_features
    assert len(borders) == num_splits(in_features) + 1
    lengths = [last - first for first, last in itertools.pairwise(borders)]
    assert min(lengths) > 0
    assert all(length % BORDER == 0 for length in lengths)
    assert max(lengths) - min(lengths) <= BORDER


@pytest.mark.parametrize(
    ("in_features", "splits"),
    [(128, 1), (512, 1), (640, 2), (896, 2), (3072, 6), (4096, 8), (4224, 8), (17408, MAX_SPLITS)],
)
def test_known_widths(in_features: int, splits: int) -> None:
    assert num_splits(in_features) == splits


def test_uneven_borders_are_as_published() -> None:
    assert split_borders(640) == (0, 256, 640)
    assert split_borders(4224) == (0, 512, 1024, 1536, 2048, 2560, 3072, 3584, 4224)


@pytest.mark.parametrize("in_features", [0, 64, 200])
def test_other_widths_are_refused(in_features: int) -> None:
    with pytest.raises(AssertionError):
        split_borders(in_features)
