"""`espalier serve` as a process: signals, exit codes, and what it prints. Its cluster is a fake; the real one is tested in tests/cluster."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from espalier.cluster.config import ClusterConfig, GatewayConfig, ServedModel
from espalier.deploy.local import ECHO_S, greeting
from espalier.replicas.config import EngineConfig
from tests.support.tiny import make_tiny_checkpoint

WAIT_S = 60
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def start(root: Path, tiny: Path) -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "tests.support.fake_serve", *arguments, "--model", str(tiny)]
        process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def read_until(process: "subprocess.Popen[str]", word: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if word in line:
            return seen
    raise AssertionError(f"{word!r} never came; stdout: {seen}; stderr: {process.stderr and process.stderr.read()}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_gracefully(start: Start, number: signal.Signals) -> None:
    process = start("starts", "stops", "--drain-timeout", "2.5", "--name", "mine")
    ready = read_until(process, "curl")
    assert "is ready" in ready
    assert "mine x 2" in ready
    process.send_signal(number)
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "stop within 2.5" in out
    assert err == ""


def test_a_second_signal_ends_it_at_once(start: Start) -> None:
    process = start("starts", "hangs")
    read_until(process, "curl")
    process.send_signal(signal.SIGTERM)
    read_until(process, "stop within")
    time.sleep(ECHO_S)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT_S / 2)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_signal_that_comes_twice_is_one(start: Start) -> None:
    process = start("starts", "stops")
    read_until(process, "curl")
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "stop within" in out


@pytest.mark.parametrize(("how", "sign"), [("hangs", "starting"), ("hangs-in-ray", "ray starts")])
def test_a_signal_interrupts_a_start(start: Start, how: str, sign: str) -> None:
    process = start(how, "stops")
    read_until(process, sign)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=WAIT_S / 2)
    assert (process.returncode, err) == (0, "")
    assert "stopped before it was ready" in out


def test_a_start_that_fails_is_one_line_and_exit_code_1(start: Start) -> None:
    process = start("fails", "stops")
    _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert err == "espalier: http_port: port 5000 is taken\n"


def test_listening_without_keys_is_warned_of_in_the_log(start: Start) -> None:
    process = start("starts", "stops", "--host", "0.0.0.0", "--log-json")
    read_until(process, "curl")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=WAIT_S)
    assert '"level": "warning"' in err
    assert "without API keys" in err


def test_the_greeting_can_be_pasted_into_a_shell() -> None:
    model = ServedModel(name="it's mine", engine=EngineConfig(model_path=Path("m")))
    config = ClusterConfig(models=(model,), gateway=GatewayConfig(api_key_file=Path("k")))
    command = greeting(config, "http://h:1", "h:2", 1.0, {}).splitlines()[-1].partition("try: curl ")[2]
    script = f'printf "%s\\n" {command}'
    words = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[0] == "http://h:1/v1/chat/completions"
    assert "Authorization: Bearer KEY" in words
    assert "it's mine" in words[-1]
