"""What is counted and looked at before anything starts. The command's own complaints are in test_cli.py."""

from pathlib import Path

import pytest

from espalier.cluster.config import ServedModel
from espalier.deploy.check import check_model, gpus_wanted
from espalier.replicas.config import EngineConfig
from espalier.replicas.errors import InvalidRequestError
from tests.support.tiny import make_tiny_checkpoint


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ([], 0),
        ([(0.0, 2)], 0),
        ([(1.0, 1)], 1),
        ([(3.0, 2)], 6),
        ([(0.5, 2)], 1),
        ([(0.1, 10)], 1),
        # Less than two GPUs' worth, but no two of them fit on one.
        ([(0.6, 3)], 3),
        ([(0.3, 2), (0.7, 2)], 2),
        ([(2.0, 1), (0.5, 1), (0.25, 1)], 3),
    ],
)
def test_a_share_of_a_gpu_lies_on_one(asked: list[tuple[float, int]], wanted: int) -> None:
    assert gpus_wanted(asked, num_gpus=8) == wanted


@pytest.mark.parametrize(
    ("asked", "least"),
    [([(1e12, 1)], 1e12), ([(0.5, 10**12), (0.0, 10**12)], 5e11), ([(0.6, 3)], 1.8)],
)
def test_more_than_there_is_is_told_without_a_look_at_each_replica(
    asked: list[tuple[float, int]], least: float
) -> None:
    assert gpus_wanted(asked, num_gpus=1) == least
    assert gpus_wanted([(0.0, 10**12)], num_gpus=0) == 0


def test_a_host_tier_without_room_for_a_block_is_told_before_anything_starts(tmp_path: Path) -> None:
    engine = EngineConfig(model_path=make_tiny_checkpoint(tmp_path / "model"), host_kv_gb=1e-6)
    with pytest.raises(InvalidRequestError, match=r"^host_kv_gb: 1e-06 GiB hold no block of \d+ bytes$"):
        check_model(ServedModel(name="tiny", engine=engine))
