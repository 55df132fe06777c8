"""The builders of a Serve config, as far as they need no Ray: what their `args` become, and what is refused by key."""

from typing import Any

import pytest

from espalier.cluster.serve_config import engine_from_options, gateway_from_options, read_args
from espalier.replicas.errors import InvalidRequestError

MODEL = {"name": "first", "model": "/models/first"}


def deployment_of(application: Any) -> tuple[Any, tuple[Any, ...]]:
    """The application's only deployment, and what its constructor gets."""
    bound = application._bound_deployment
    return bound, bound.init_args


def test_an_engine_asks_ray_for_what_its_options_say() -> None:
    args = MODEL | {
        "replicas": 3,
        "cpus": 2.5,
        "gpus": 1,
        "drain_timeout": 5,
        "resources": {"espalier-engine-first": 0.001},
    }
    deployment, (model, *_) = deployment_of(engine_from_options(args))
    assert deployment.num_replicas == 3
    assert deployment.ray_actor_options == {
        "num_cpus": 2.5,
        "num_gpus": 1,
        "resources": {"espalier-engine-first": 0.001},
    }
    assert deployment._deployment_config.graceful_shutdown_timeout_s == 15
    assert (model.name, str(model.engine.model_path)) == ("first", "/models/first")


@pytest.mark.parametrize(
    ("options", "threads"), [({"cpus": 3.5}, 3), ({"cpus": 0.5}, 1), ({}, 1), ({"cpus": 4, "cpu_threads": 2}, 2)]
)
def test_an_engine_has_as_many_threads_as_cpus_unless_told(options: dict[str, Any], threads: int) -> None:
    _, (model, *_) = deployment_of(engine_from_options(MODEL | options))
    assert model.engine.cpu_threads == threads


def test_one_gateway_serves_all_models_and_takes_no_cpu() -> None:
    models = [MODEL, {"name": "second", "model": "/models/second"}]
    args = {"host": "0.0.0.0", "models": models, "log_json": True, "resources": {"espalier-gateway": 1}}
    deployment, (config, logs, *_) = deployment_of(gateway_from_options(args))
    assert deployment.num_replicas == 1
    assert deployment.ray_actor_options["num_cpus"] == 0
    assert deployment.ray_actor_options["resources"] == {"espalier-gateway": 1}
    assert [model.name for model in config.models] == ["first", "second"]
    assert (config.gateway.host, logs.as_json) == ("0.0.0.0", True)


def test_nodes_need_no_resource_where_none_is_named() -> None:
    assert read_args(MODEL)[1] == {}
    deployment, _ = deployment_of(gateway_from_options({"models": [MODEL]}))
    assert deployment.ray_actor_options["resources"] == {}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "args.model: say which"),
        ({"models": [MODEL, {"name": "second"}]}, "args.models[1].model: say which"),
        ({"model": "models/first"}, "args.model: must be an absolute path"),
        ({"model": "org/name@main"}, "args.model: must be an absolute path"),
        (MODEL | {"max_lane": 3}, "args.max_lane: unknown key (did you mean max_lanes?)"),
        (MODEL | {"max_lanes": "3"}, "args.max_lanes: must be a whole number, not '3'"),
        (MODEL | {"replicas": 0}, "args.replicas: must be at least 1"),
        (MODEL | {"device": "cuda", "gpus": 0}, "args.gpus: must be more than 0 where replicas run on GPUs"),
        ({"models": [MODEL, MODEL | {"name": "b"}]}, "args.models: an engine application serves one model"),
        ({"models": []}, "args.models: must be a list of models"),
        ({"models": [MODEL | {"host": "x"}]}, "args.models[0].host: unknown key"),
        (MODEL | {"resources": ["a"]}, "args.resources: must map names of Ray resources to amounts"),
        (MODEL | {"resources": {"a": 0}}, "args.resources.a: must be a positive amount, not 0"),
        (MODEL | {"resources": {"a": True}}, "args.resources.a: must be a positive amount, not True"),
        (MODEL | {"resources": {"a": "1"}}, "args.resources.a: must be a positive amount, not '1'"),
        (MODEL | {"resources": {"a": float("inf")}}, "args.resources.a: must be a positive amount, not inf"),
    ],
)
def test_args_are_refused_by_key(args: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        engine_from_options(args)
    assert message in refused.value.message
