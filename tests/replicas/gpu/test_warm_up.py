"""The warm-up compiles exactly the kernels that a shard's load would, does nothing when it need not, and fails no load."""

import dataclasses
import logging
import multiprocessing
import re
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file

from espalier.kernels.device import DeviceClass
from espalier.replicas.config import EngineConfig
from espalier.replicas.gpu.rounds import RoundShapes
from espalier.replicas.model.checkpoint import Checkpoint, open_checkpoint
from tests.support.safetensors_edit import edit_tensors
from tests.support.sass import needs_triton
from tests.support.tiny import make_tiny_checkpoint

pytestmark = needs_triton
T = TypeVar("T")

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layers of two rates": ({"architecture": "qwen3", "layers": 4}, {}),
    "two tracks, bf16": ({"architecture": "llama", "codebook": "mcg"}, {"tracks": 2, "kv_dtype": "bf16"}),
    "padded widths, biases": (
        {"architecture": "qwen2", "hidden": 96, "intermediate": 160, "head_dim": 32, "vocab": 600},
        {},
    ),
    "plain, tied": ({"quantized": False, "head": "tied"}, {"block_size": 32}),
}
# Quick to compile, in Triton and in Gluon.
CHEAP = {"_gather_kernel", "_keep_drawn_kernel", "_apply_updates_kernel", "rows_mma"}


def elsewhere(work: Callable[..., T], *args: object) -> T:
    """In a process of its own, which the work may leave in any state."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        model_path=folder / "model",
        device="cuda",
        cache_dir=folder,
        kv_tokens=4096,
        max_context=2048,
        max_lanes=24,
        batch_tokens=256,
        **options,
    )


@pytest.mark.parametrize("case", MODELS)
def test_the_kernels_are_those_of_the_load(tmp_path: Path, case: str) -> None:
    from tests.support.kernel_lists import compiled_ahead, compiled_by_shard

    model, options = MODELS[case]
    folder = make_tiny_checkpoint(tmp_path / "model", **model)
    if "rates" in case:
        other = load_file(make_tiny_checkpoint(tmp_path / "other", bits=3, **model) / "model.safetensors")
        last = {name: tensor for name, tensor in other.items() if name.startswith("model.layers.3.")}
        edit_tensors(folder / "model.safetensors", lambda tensors: tensors.update(last))
    rounds, at_load = elsewhere(compiled_by_shard, config_of(tmp_path, **options))
    assert len(at_load) > 20
    assert elsewhere(compiled_ahead, rounds) == at_load


def test_they_are_compiled_into_the_cache_though_one_fails(tmp_path: Path) -> None:
    from tests.support.kernel_lists import H200, compile_some

    checkpoint = open_checkpoint(make_tiny_checkpoint(tmp_path / "model"))
    rounds = rounds_of(checkpoint, H200)
    failures, found, wanted = elsewhere(compile_some, rounds, CHEAP, tmp_path / "cache")
    assert len(failures) == 1
    assert found == wanted and len(wanted) > 4


def test_a_layer_of_each_kind(tmp_path: Path) -> None:
    from espalier.replicas.gpu.compile_rounds import META, distinct_layers
    from espalier.replicas.gpu.load import load_network

    four, three = (
        load_network(open_checkpoint(make_tiny_checkpoint(tmp_path / str(bits), layers=4, bits=bits)), META, 64).layers
        for bits in (4, 3)
    )
    network = load_network(open_checkpoint(tmp_path / "4"), META, 64)
    assert distinct_layers(network).layers == (network.layers[0], network.layers[3])
    mixed = dataclasses.replace(network, layers=(*four[:2], *three[:2], four[2]))
    assert distinct_layers(mixed).layers == (four[0], four[2], three[1])


def rounds_of(checkpoint: Checkpoint, device: DeviceClass, lanes: int = 2) -> Any:
    from espalier.replicas.gpu.warm_up import Rounds

    return Rounds(checkpoint.path, (RoundShapes.plan(lanes, 32, 1024),), lanes, 16, torch.float16, 1024, device)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(make_tiny_checkpoint(tmp_path / "model"))


@pytest.fixture
def warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """The module, with a cache of its own, four cores, and processes that compile nothing and say so."""
    from espalier.replicas.gpu import warm_up

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(warm_up, "usable_cpus", lambda: 4)
    says(monkeypatch, warm_up, 'print(\'{"kernels": 7, "failures": []}\')')
    caplog.set_level(logging.INFO, warm_up.__name__)
    return warm_up


def says(monkeypatch: pytest.MonkeyPatch, warm_up: Any, program: str) -> None:
    monkeypatch.setattr(warm_up, "_COMMAND", (sys.executable, "-c", program))


def test_the_second_start_does_nothing(warm_up: Any, checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    from tests.support.kernel_lists import H200

    rounds = rounds_of(checkpoint, H200)
    first = warm_up.WarmUp.begin(rounds, checkpoint)
    first.wait()
    (line,) = caplog.messages
    assert re.fullmatch(r"7 kernels compiled ahead in \d+\.\d s, 3 at a time", line)
    # Without `remember`, say because the load failed, the next start tries again.
    again = warm_up.WarmUp.begin(rounds, checkpoint)
    assert again._process is not None
    again.wait()
    again.remember()
    caplog.clear()
    warm = warm_up.WarmUp.begin(rounds, checkpoint)
    assert warm._process is None
    warm.wait()
    warm.remember()
    other = warm_up.WarmUp.begin(rounds_of(checkpoint, H200, lanes=3), checkpoint)
    assert other._process is not None
    assert caplog.messages == []
    other.wait()


def test_what_kernels_depend_on_is_in_their_id(
    warm_up: Any, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.kernel_lists import H200

    rounds = rounds_of(checkpoint, H200)
    found = [warm_up.kernels_id(rounds, checkpoint)]
    assert warm_up.kernels_id(rounds_of(checkpoint, H200), checkpoint) == found[0]
    changes: tuple[dict[str, Any], ...] = (
        {"kv_dtype": torch.bfloat16},
        {"block_size": 32},
        {"max_context": 512},
        {"device": dataclasses.replace(H200, num_sms=114)},
        {"shapes": rounds.shapes * 2},
    )
    found += [warm_up.kernels_id(dataclasses.replace(rounds, **change), checkpoint) for change in changes]
    other = open_checkpoint(make_tiny_checkpoint(tmp_path / "other", bits=3))
    found.append(warm_up.kernels_id(rounds, other))
    monkeypatch.setattr(warm_up.ahead, "compiler", lambda: "another")
    found.append(warm_up.kernels_id(rounds, checkpoint))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    found.append(warm_up.kernels_id(rounds, checkpoint))
    assert len(set(found)) == len(found)


def test_the_command_says_what_stopped_it(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from espalier.replicas.gpu.warm_up import WarmUp
    from tests.support.kernel_lists import H200

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("espalier.replicas.gpu.warm_up.usable_cpus", lambda: 2)
    rounds = dataclasses.replace(rounds_of(checkpoint, H200), model_path=tmp_path / "gone")
    WarmUp.begin(rounds, checkpoint).wait()
    (line,) = caplog.messages
    assert line.startswith("kernels were not compiled ahead: ") and "CheckpointError" in line and "gone" in line


@pytest.mark.parametrize(
    ("program", "line"),
    [
        ("raise SystemExit('no luck')", "kernels were not compiled ahead: no luck; they are compiled now"),
        ("import os; os._exit(3)", "kernels were not compiled ahead: exit code 3; they are compiled now"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "kernels were not compiled ahead: exit code -9; they",
        ),
        ("import time; time.sleep(600)", "kernels were not compiled ahead within 1 s; the rest is compiled now"),
        (
            'print(\'{"kernels": 1, "failures": ["a: b", "c: d"]}\')',
            "2 more could not be compiled ahead, such as a: b; they are compiled now",
        ),
    ],
)
def test_a_failure_costs_a_line(
    warm_up: Any,
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    program: str,
    line: str,
) -> None:
    from tests.support.kernel_lists import H200

    says(monkeypatch, warm_up, program)
    if "sleep" in program:
        monkeypatch.setattr(warm_up, "_PATIENCE_S", 1.0)
    begun = warm_up.WarmUp.begin(rounds_of(checkpoint, H200), checkpoint)
    begun.wait()
    (warning,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith(line)
    assert begun._process.returncode is not None
    begun.remember()


def test_where_no_process_can_be_started(
    warm_up: Any, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.support.kernel_lists import H200

    monkeypatch.setattr(warm_up, "_COMMAND", ("/nowhere/python",))
    begun = warm_up.WarmUp.begin(rounds_of(checkpoint, H200), checkpoint)
    begun.wait()
    (line,) = caplog.messages
    assert "No such file" in line
    begun.remember()
    assert warm_up.WarmUp.begin(rounds_of(checkpoint, H200), checkpoint)._mark is None


@pytest.mark.parametrize("reason", ["interpreted", "one core", "no cache"])
def test_where_it_would_not_help(
    warm_up: Any, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    from tests.support.kernel_lists import H200

    device = H200
    if reason == "interpreted":
        device = DeviceClass(triton=True)
    elif reason == "one core":
        monkeypatch.setattr(warm_up, "usable_cpus", lambda: 1)
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    begun = warm_up.WarmUp.begin(rounds_of(checkpoint, device), checkpoint)
    assert begun._process is None
    begun.wait()
    begun.remember()
    assert not list(tmp_path.glob("cache/espalier-*"))
