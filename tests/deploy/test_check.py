"""What is counted before anything starts. The command's own complaints are in test_cli.py."""

import pytest

from espalier.deploy.check import gpus_wanted


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ([], 0),
        ([0.0, 0.0], 0),
        ([1.0], 1),
        ([3.0, 3.0], 6),
        ([0.5, 0.5], 1),
        ([0.1] * 10, 1),
        # Less than two GPUs' worth, but no two of them fit on one.
        ([0.6, 0.6, 0.6], 3),
        ([0.3, 0.7, 0.3, 0.7], 2),
        ([2.0, 0.5, 0.25], 3),
    ],
)
def test_a_share_of_a_gpu_lies_on_one(asked: list[float], wanted: int) -> None:
    assert gpus_wanted(asked) == wanted
