"""The command: what it prints, and what its exit code tells."""

from pathlib import Path

import pytest
import yaml

import espalier
from espalier.deploy.cli import main
from espalier.deploy.encode import job
from tests.support.tiny import make_tiny_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"espalier {espalier.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--max-lane", "4"], "unknown argument --max-lane (did you mean --max-lanes?)"),
        (["check", "--max-lanes=x"], "--max-lanes: must be a whole number, not 'x'"),
        (["check", "--model", "/absent"], "--model: there is no folder /absent"),
        (["check", "--device", "cuda"], "--device: this machine has no GPU; say cpu or auto"),
        (["serve", "extra"], "unknown argument extra"),
        (["bench", "--level", "3"], "unknown argument --level (did you mean --levels?)"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("argv", [[], ["serv"], ["encode"]])
def test_mistakes_that_the_parser_finds_have_exit_code_2_too(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2


def test_a_download_that_fails_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--model", "org/surely-not-in-any-cache"]) == 1
    assert "the hub cannot be reached" in capsys.readouterr().err


def test_check_prints_a_file_that_serve_reads(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--model", str(tiny), "--replicas", "1", "--host", "0.0.0.0"]) == 0
    first = capsys.readouterr()
    assert yaml.safe_load(first.out)["models"][0]["name"] == "tiny"
    assert "without API keys" in first.err
    (tmp_path / "serve.yaml").write_text(first.out)
    assert main(["check", "--config", str(tmp_path / "serve.yaml")]) == 0
    assert capsys.readouterr().out == first.out


def test_check_holds_the_context_against_the_model(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--model", str(tiny), "--context", "100000000"]) == 2
    assert capsys.readouterr().err.startswith("espalier: --context: tiny has positions for ")


def test_check_counts_the_gpus_that_replicas_ask_for(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--model", str(tiny), "--replicas", "2", "--gpus", "1000"]) == 2
    assert capsys.readouterr().err.startswith("espalier: gpus: all replicas ask for 2000, and this machine has ")


def test_check_counts_the_memory_that_replicas_ask_for(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--model", str(tiny), "--replicas", "2", "--host-kv-gb", "50000.5"]) == 2
    assert capsys.readouterr().err.startswith(
        "espalier: host_kv_gb: all replicas ask for 100001 GiB, and this machine "
    )


def test_check_refuses_a_broken_checkpoint_by_file(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    assert main(["check", "--model", str(broken)]) == 2
    assert weights.name in capsys.readouterr().err


def test_check_refuses_a_key_file_that_would_let_nobody_in(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    argv = ["check", "--model", str(tiny), "--api-key-file", str(keys)]
    assert main(argv) == 2
    keys.write_text("ann: sk-1\n")
    keys.chmod(0o644)
    assert main(argv) == 2
    assert "0644" in capsys.readouterr().err
    keys.chmod(0o600)
    assert main(argv) == 0


def test_check_refuses_a_model_without_a_tokenizer(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mute = tmp_path / "mute"
    mute.mkdir()
    for file in tiny.iterdir():
        if not file.name.startswith("tokenizer"):
            (mute / file.name).write_bytes(file.read_bytes())
    assert main(["check", "--model", str(mute)]) == 2
    assert "tokenizer" in capsys.readouterr().err


def test_encode_passes_everything_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, Path, dict[str, object]]] = []
    monkeypatch.setattr(
        job, "encode_checkpoint", lambda source, output, **options: calls.append((source, output, options))
    )
    flags = ["--bits", "3.5", "--head-bits", "8", "--codebook", "mcg", "--threads", "2", "--seed", "5"]
    assert main(["encode", "in.gguf", str(tmp_path), *flags]) == 0
    expected = {"bits": 3.5, "head_bits": 8.0, "codebook": "mcg", "threads": 2, "seed": 5, "progress": True}
    assert calls == [(Path("in.gguf"), tmp_path, expected)]


def test_encode_names_the_option_that_is_wrong(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["encode", str(tiny), str(tmp_path / "out"), "--bits", "9"]) == 2
    assert "bits: must be one of" in capsys.readouterr().err


def test_an_interrupt_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "encode_checkpoint", interrupted)
    assert main(["encode", "in", "out"]) == 130
    assert capsys.readouterr().err == ""
