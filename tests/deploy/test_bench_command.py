"""`espalier bench --engine` as a command, on a real tiny model: its exit codes, its reports, and what it needs to be installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from espalier.cluster.options import OPTIONS
from espalier.deploy.bench import engine_options
from espalier.deploy.bench.prompts import KINDS, read_prompts
from espalier.deploy.cli import build_parser, main
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.schedule.step import SampledToken, Step, StepResult
from espalier.replicas.shard import Shard
from tests.support.tiny import make_tiny_checkpoint

# What a machine with a GPU and little else does not have.
ABSENT = (
    "ray",
    "aiohttp",
    "grpc",
    "uvicorn",
    "starlette",
    "pydantic",
    "prometheus_client",
    "yaml",
    "tokenizers",
    "jinja2",
)
WITHOUT = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT!r}:
            raise ImportError(name, name=name)
sys.meta_path.insert(0, Absent())
from espalier.deploy.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", layers=1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def engine(tiny: Path, cache: Path) -> list[str]:
    device = ["--device", "cpu", "--cpu-threads", "1", "--context", "1024", "--cache-dir", str(cache)]
    return ["bench", "--engine", str(tiny), *device]


def test_cells_of_text_on_a_real_model(
    tiny: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = ["--levels", "3", "--tokens", "20", "--distinct", "2", "--prompts", "chat"]
    out = tmp_path / "out.json"
    assert main([*engine(tiny, cache), *cells, "--fresh", "--serial", "--prefill", "200", "--json", str(out)]) == 0
    assert "turn-past-84" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert [(row["streams"], row["comparison"]["equal"]) for row in found["rows"]] == [
        (streams, equal) for _ in range(2) for streams, equal in (("alone", 0), ("serial", 2), ("3", 3))
    ]
    assert found["targets"][0]["device"] and found["targets"][0]["setup"]["torch"]
    assert found["setup"]["options"]["cpu_threads"] == "1"
    assert found["notes"] == []


def test_a_run_is_held_against_an_earlier_one(
    tiny: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = tmp_path / "first.json"
    cells = ["--prompt-tokens", "20,5", "--levels", "2", "--tokens", "12", "--greedy"]
    assert main([*engine(tiny, cache), *cells, "--json", str(first)]) == 0
    again = [*engine(tiny, cache), "--no-prefix-cache", "--max-lanes", "1", "--same-as", str(first)]
    assert main([*again, *cells]) == 0
    assert "Against the earlier run: 2 equal, 0 unequal" in capsys.readouterr().out
    first.write_text(first.read_text().replace('"token_sha256": "', '"token_sha256": "0'))
    assert main([*again, *cells]) == 1
    assert "greedy, random-0: not the reply that" in capsys.readouterr().err
    assert main([*again, *cells, "--seed", "5"]) == 2
    assert "its prompts, their order or --tokens" in capsys.readouterr().err
    first.write_text("{}")
    assert main([*again, *cells]) == 2


def test_a_soak_of_a_real_model(tiny: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "soak.json"
    soak = ["--soak", "0.3", "--distinct", "6", "--levels", "4", "--json", str(out)]
    assert main([*engine(tiny, cache), *soak]) == 0
    assert "nothing" in capsys.readouterr().out
    found = json.loads(out.read_text())["soak"]
    assert found["comparison"]["equal"] == found["requests"] >= 4
    assert found["end"]["host_bytes"] >= found["start"]["host_bytes"] > 0


def test_a_shard_whose_rows_meet_ends_in_exit_code_1(
    tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exact = Shard.execute

    def execute(shard: Shard, step: Step) -> StepResult:
        result = exact(shard, step)
        if len(step.lanes) < 3:
            return result
        drawn = {seq_id: (SampledToken(7, None),) * len(tokens) for seq_id, tokens in result.sampled.items()}
        return StepResult(result.step_id, drawn, result.failed)

    monkeypatch.setattr(Shard, "execute", execute)
    random = ["--prompt-tokens", "16", "--levels", "3", "--tokens", "6", "--greedy"]
    assert main([*engine(tiny, cache), *random]) == 1
    said = capsys.readouterr()
    assert "wrong: A, random, greedy, 3, random-0: token" in said.err
    assert main([*engine(tiny, cache), *random, "--no-alone"]) == 0


def test_random_tokens_need_nothing_but_torch_and_numpy(tiny: Path, cache: Path) -> None:
    def run(*more: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", WITHOUT, *engine(tiny, cache), *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    (tiny / "tokenizer.json").rename(tiny / "elsewhere.json")
    try:
        found = run("--prompt-tokens", "24", "--levels", "1,2", "--tokens", "4", "--fresh")
    finally:
        (tiny / "elsewhere.json").rename(tiny / "tokenizer.json")
    assert found.returncode == 0, found.stderr
    assert "random" in found.stdout
    text = run("--prompts", "chat")
    assert text.returncode == 2
    assert "prompts of text need the package" in text.stderr


def test_prompts_of_text_can_be_taken_to_where_there_is_no_tokenizer(tiny: Path, cache: Path, tmp_path: Path) -> None:
    prompts, text, ids = tmp_path / "prompts.jsonl", tmp_path / "text.json", tmp_path / "ids.json"
    assert main(["bench", "--engine", str(tiny), "--distinct", "2", "--write-prompts", str(prompts)]) == 0
    assert {prompt.kind for prompt in read_prompts(prompts)} == set(KINDS)
    cells = ["--levels", "1", "--tokens", "5", "--greedy", "--context", "4096"]
    assert main([*engine(tiny, cache), *cells, "--distinct", "2", "--json", str(text)]) == 0
    command = [
        sys.executable,
        "-c",
        WITHOUT,
        *engine(tiny, cache),
        *cells,
        "--prompts",
        str(prompts),
        "--json",
        str(ids),
    ]
    subprocess.run(command, check=True, timeout=100, capture_output=True)
    one, two = (
        {solo["prompt"]: solo["token_sha256"] for solo in json.loads(file.read_text())["solo"]} for file in (text, ids)
    )
    assert one == two
    assert len(one) == 8


def test_every_engine_option_has_its_flag() -> None:
    flags = {option.name for option in OPTIONS if option.scope == "engine"} - {"model"}
    args = build_parser().parse_args(["bench", "--engine", "."])
    assert flags <= vars(args).keys()
    assert engine_options.given(args) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--max-lanes", "x"], "--max-lanes: must be a whole number, not 'x'"),
        (["--max-lanes", "0"], "max_lanes: must be at least 1"),
        (["--device", "tpu"], "--device: must be one of auto, cpu, cuda"),
    ],
)
def test_options_that_are_wrong_are_refused_by_name(tmp_path: Path, given: list[str], message: str) -> None:
    args = build_parser().parse_args(["bench", "--engine", str(tmp_path), *given])
    with pytest.raises(InvalidRequestError, match=message):
        engine_options.read(str(tmp_path), args)


def test_options_reach_the_config(tmp_path: Path) -> None:
    given = ["--device", "cpu", "--max-lanes", "3", "--no-prefix-cache", "--context", "500"]
    args = build_parser().parse_args(["bench", "--engine", str(tmp_path), *given])
    config = engine_options.read(str(tmp_path), args)
    assert (config.max_lanes, config.prefix_cache, config.max_context) == (3, False, 500)
