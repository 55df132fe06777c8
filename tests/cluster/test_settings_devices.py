"""Where replicas run, how many there are and what they ask of Ray, by what was said and what GPUs there are."""

from pathlib import Path

import pytest

from espalier.cluster.config import ServedModel
from espalier.cluster.serve_config import read_args
from espalier.cluster.settings import LocatedModel, compose, merge, read_mapping
from espalier.replicas.config import EngineConfig
from espalier.replicas.errors import InvalidRequestError


def placed(num_gpus: int | None, **options: object) -> tuple[str, int, float]:
    """Device, replicas, and GPUs of each."""
    (model,) = compose(merge(read_mapping(options, ""), {}), _locate, num_gpus=num_gpus).models
    return model.engine.device, model.num_replicas, model.num_gpus


def _locate(model: str | None, _cache_dir: Path) -> LocatedModel:
    return LocatedModel(Path(model or "/models/default"), Path(model or "default").name)


@pytest.mark.parametrize(
    ("num_gpus", "options", "expected"),
    [
        (0, {}, ("cpu", 2, 0.0)),
        (1, {}, ("cuda", 1, 1.0)),
        (8, {}, ("cuda", 8, 1.0)),
        (8, {"replicas": 2}, ("cuda", 2, 1.0)),
        (1, {"gpus": 0.5}, ("cuda", 2, 0.5)),
        (8, {"gpus": 3}, ("cuda", 2, 3.0)),
        (1, {"device": "cuda"}, ("cuda", 1, 1.0)),
        (1, {"device": "cpu"}, ("cpu", 2, 0.0)),
        (1, {"gpus": 0}, ("cpu", 2, 0.0)),
    ],
)
def test_on_this_machine_its_gpus_are_taken_one_for_each_replica(
    num_gpus: int, options: dict[str, object], expected: tuple[str, int, float]
) -> None:
    assert placed(num_gpus, **options) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("cpu", 2, 0.0)),
        ({"gpus": 1}, ("cuda", 2, 1.0)),
        ({"gpus": 1, "device": "cpu"}, ("cpu", 2, 1.0)),
        ({"device": "cuda"}, ("cuda", 2, 1.0)),
        ({"device": "cuda", "gpus": 2, "replicas": 5}, ("cuda", 5, 2.0)),
    ],
)
def test_on_other_machines_it_is_what_was_said(options: dict[str, object], expected: tuple[str, int, float]) -> None:
    assert placed(None, **options) == expected
    (model,) = read_args({"model": "/models/a", **options})[0].models
    assert (model.engine.device, model.num_replicas, model.num_gpus) == expected


def test_several_models_share_the_gpus() -> None:
    options = {"models": [{"model": "/a"}, {"model": "/b"}, {"model": "/c", "device": "cpu"}]}
    models = compose(merge(read_mapping(options, ""), {}), _locate, num_gpus=7).models
    assert [(model.engine.device, model.num_replicas) for model in models] == [("cuda", 2), ("cuda", 2), ("cpu", 2)]


def test_cuda_is_refused_where_there_is_none() -> None:
    with pytest.raises(InvalidRequestError, match=r"^device: this machine has no GPU; say cpu or auto$"):
        placed(0, device="cuda")


def test_a_model_on_gpus_asks_for_some() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ServedModel(name="a", engine=EngineConfig(model_path=Path("m"), device="cuda"))
    assert caught.value.param == "num_gpus"


def test_a_part_beside_whole_gpus_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"^gpus: must be a whole number where it is more than 1$"):
        placed(8, gpus=1.5)
    assert placed(8, gpus=2) == ("cuda", 4, 2.0)


@pytest.mark.parametrize(
    ("said", "expected"), [({}, 0.9), ({"gpus": 0.5}, 0.45), ({"gpus": 0.5, "memory_share": 0.3}, 0.3)]
)
def test_replicas_that_share_a_gpu_share_its_memory(said: dict[str, float], expected: float) -> None:
    (model,) = compose(merge(read_mapping({"model": "/a", **said}, ""), {}), _locate, num_gpus=2).models
    assert model.engine.memory_share == expected
