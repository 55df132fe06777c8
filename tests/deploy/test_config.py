"""Where settings come from, which one counts, and how each complaint names its source."""

from dataclasses import fields
from pathlib import Path

import pytest

from espalier.cluster.config import ClusterConfig, ServedModel
from espalier.cluster.options import BY_NAME, OPTIONS, OWNERS
from espalier.cluster.settings import LocatedModel, compose
from espalier.deploy.config import advice, dump, resolve
from espalier.replicas.config import EngineConfig
from espalier.replicas.errors import InvalidRequestError


def locate(model: str | None, cache_dir: Path) -> LocatedModel:
    return LocatedModel(Path(model or cache_dir / "default"), model or "default-model")


def config_of(
    flags: dict[str, str] | None = None, environ: dict[str, str] | None = None, file: Path | None = None
) -> ClusterConfig:
    return compose(resolve(flags or {}, environ or {}, config_file=str(file) if file else None), locate)


def advice_on(**flags: str) -> list[str]:
    settings = resolve(flags, {})
    return advice(compose(settings, locate))


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "serve.yaml"
        path.write_text(text)
        return path

    return write


def test_nothing_set_gives_two_replicas_of_the_default_model() -> None:
    config = config_of()
    (model,) = config.models
    assert (model.name, model.num_replicas, model.engine.device) == ("default-model", 2, "cpu")
    assert model.engine.cache_dir == Path.home() / ".cache" / "espalier"
    assert (config.gateway.host, config.gateway.http_port, config.gateway.grpc_port) == ("127.0.0.1", 5000, 50051)


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        ({}, {}, 3),
        ({}, {"ESPALIER_MAX_LANES": "5"}, 5),
        ({"max_lanes": "7"}, {"ESPALIER_MAX_LANES": "5"}, 7),
        ({}, {"ESPALIER_MAX_LANES": ""}, 3),
    ],
    ids=["file", "environment over file", "flag over environment", "empty variable is unset"],
)
def test_precedence(write, flags: dict[str, str], environ: dict[str, str], expected: int) -> None:
    config = config_of(flags, environ, write("max_lanes: 3\nmodel: m\n"))
    assert config.models[0].engine.max_lanes == expected


def test_the_file_may_be_named_by_a_variable_and_a_flag_wins_over_it(write, tmp_path: Path) -> None:
    path = write("http_port: 1234\n")
    assert config_of(environ={"ESPALIER_CONFIG": str(path)}).gateway.http_port == 1234
    other = tmp_path / "other.yaml"
    other.write_text("http_port: 4321\n")
    assert config_of(environ={"ESPALIER_CONFIG": str(path)}, file=other).gateway.http_port == 4321


def test_several_models_share_the_top_of_the_file_and_differ_below(write) -> None:
    file = write("context: 2048\nmodels:\n- {model: a, replicas: 1}\n- {model: b, name: bee, context: 4096}\n")
    first, second = config_of({"kv_dtype": "fp16"}, file=file).models
    assert (first.name, first.num_replicas, first.engine.max_context, first.engine.kv_dtype) == ("a", 1, 2048, "fp16")
    assert (second.name, second.num_replicas, second.engine.max_context) == ("bee", 2, 4096)


def test_one_model_of_a_list_can_be_replaced_by_a_flag(write) -> None:
    assert config_of({"model": "c"}, file=write("models: [{model: a, name: x}]")).models[0].engine.model_path == Path(
        "c"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_lane: 3", "max_lane: unknown key (did you mean max_lanes?)"),
        ("models: [{model: a, replica: 3}]", "models[0].replica: unknown key (did you mean replicas?)"),
        ("models: [{model: a}, {model: b, host: x}]", "models[1].host: unknown key"),
        ("models: [{model: a, max_lanes: many}]", "models[0].max_lanes: must be a whole number, not 'many'"),
        ("models: [{model: a, replicas: 0}]", "models[0].replicas: must be at least 1"),
        ("max_lanes: true", "max_lanes: must be a whole number, not True"),
        ("max_lanes: 3.0", "max_lanes: must be a whole number, not 3.0"),
        ("host: 1", "host: must be some text, not 1"),
        ('model: ""', "model: must be a folder or a hub id, not ''"),
        ("metrics_open: 1", "metrics_open: must be true or false, not 1"),
        ("http_port: 70000", "http_port: must be a port number"),
        ("keepalive: 0", "keepalive: must be positive"),
        ("affinity_min_tokens: -1", "affinity_min_tokens: must be at least 0"),
        ("log_level: loud", "log_level: must be one of debug, info, warning, error, not 'loud'"),
        (
            "models: [{model: a, device: cuda, gpus: 0}]",
            "models[0].gpus: must be more than 0 where replicas run on GPUs",
        ),
        ("models: [{model: a, gpus: 0.00001}]", "models[0].gpus: must be counted in ten-thousandths, as Ray does"),
        ("cpus: 0.12345", "cpus: must be counted in ten-thousandths, as Ray does"),
        ("device: cuda\nkv_dtype: fp32", "kv_dtype: must be fp16 or bf16 on a GPU"),
        ("tracks: 3", "tracks: must be 1 or 2"),
        ("decode_gap_ms: 0", "decode_gap_ms: must be positive"),
        ("memory_share: 1.5", "memory_share: must be over 0 and at most 1"),
        ("batch_tokens: 8", "batch_tokens: must be at least max_lanes"),
        ("models: []", "models: must be a list of models"),
        ("models: {a: b}", "models: must be a list of models"),
        ("name: a\nmodels: [{model: a}]", "name: give it in each entry of `models`"),
        ("models: [{model: a}, {model: a}]", "models: each model needs a name of its own"),
        ("models: [{model: a, name: b-1}, {model: a, name: B 1}]", "models: names must differ in more than"),
        ("- a", "must hold keys and values"),
        ("a: [", "is not valid YAML"),
        ("? [a]\n: b", "is not valid YAML"),
        ("replicas: 1\nreplicas: 2", "key 'replicas' is given twice"),
    ],
)
def test_the_file_is_refused_by_key(write, text: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        config_of(file=write(text))
    assert message in caught.value.message
    assert "serve.yaml" in caught.value.message or message.startswith(("models: each", "models: names"))


@pytest.mark.parametrize("name", ["", " tiny", "tiny\n", "ti\tny"])
def test_a_name_can_be_printed_as_it_is(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="name") as caught:
        ServedModel(name=name, engine=EngineConfig(model_path=Path("folder")))
    assert caught.value.param == "name"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"absent\.yaml: cannot be read"):
        config_of(file=tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ESPALIER_MAX_LANE", "3", "ESPALIER_MAX_LANE: unknown variable (did you mean ESPALIER_MAX_LANES?)"),
        ("ESPALIER_MAX_LANES", "x", "ESPALIER_MAX_LANES: must be a whole number, not 'x'"),
        ("ESPALIER_CPUS", "inf", "ESPALIER_CPUS: must be a number, not 'inf'"),
        ("ESPALIER_DRAIN_TIMEOUT", "nan", "ESPALIER_DRAIN_TIMEOUT: must be a number of seconds, not 'nan'"),
        ("ESPALIER_LOG_JSON", "maybe", "ESPALIER_LOG_JSON: must be true or false, not 'maybe'"),
        ("ESPALIER_BLOCK_SIZE", "17", "ESPALIER_BLOCK_SIZE: must be 16, 32, 64 or 128 tokens"),
    ],
)
def test_the_environment_is_refused_by_variable(variable: str, value: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        config_of(environ={variable: value})
    assert caught.value.message.startswith(message)


def test_flags_are_refused_by_flag_and_defaults_by_the_flag_that_would_change_them() -> None:
    with pytest.raises(InvalidRequestError, match=r"^--context: must be at least 2"):
        config_of({"context": "1"})
    with pytest.raises(InvalidRequestError, match=r"^--grpc-port \(by default 50051\): must differ from http_port"):
        config_of({"http_port": "50051"})


@pytest.mark.parametrize("name", ["model", "name"])
def test_one_name_cannot_stand_for_several_models(write, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^--{name}: the file lists 2 models"):
        config_of({name: "x"}, file=write("models: [{model: a}, {model: b}]"))


def test_dump_reads_back_to_the_same_config(write) -> None:
    flags = {"api_key_file": "/k", "log_json": "true", "drain_timeout": "2.5", "metrics_open": "yes", "context": "512"}
    config = config_of(flags, file=write("models: [{model: a}, {model: b, cpu_threads: 3, prefix_cache: false}]"))
    assert config_of(file=write(dump(config))) == config


def test_listening_beyond_this_machine_without_keys_is_warned_of() -> None:
    assert advice_on() == []
    assert advice_on(host="0.0.0.0", api_key_file="/k") == []
    (sentence,) = advice_on(host="0.0.0.0")
    assert "without API keys" in sentence


def test_every_option_names_a_field_and_every_field_has_its_option() -> None:
    """Fields that deploy sets on its own are listed here, so that a new field of a config class asks for a decision."""
    ours = {"engine", "max_steps_in_flight", "models", "gateway", "router"}
    known = {(cls, field.name) for cls in OWNERS.values() for field in fields(cls) if field.name not in ours}
    assert {(OWNERS[option.scope], option.field) for option in OPTIONS} == known
    assert len(BY_NAME) == len(OPTIONS)
