"""`espalier serve` as a process of its own, with a Ray of its own, on free ports: a cluster beside that of the test session."""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml

from tests.support.processes import engine_pids

START_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Served:
    """Where it answers, and its main process."""

    http_url: str
    grpc_address: str
    pid: int

    @property
    def http_address(self) -> str:
        """host:port."""
        return urlsplit(self.http_url).netloc

    def replica_pids(self) -> list[int]:
        """Processes of the engine replicas."""
        return engine_pids(self.pid)

    def num_ready(self) -> int:
        """Replicas that take requests now, over all models."""
        models = httpx.get(f"{self.http_url}/ready", timeout=30).json()["models"]
        return sum(state == "ready" for model in models.values() for state in model["replicas"].values())


@contextmanager
def serving(folder: Path, options: Mapping[str, Any]) -> Iterator[Served]:
    """Serve what `options` (a configuration file's content) say until the block ends. Log and file are kept in `folder`."""
    config = folder / "serve.yaml"
    config.write_text(yaml.safe_dump({"http_port": 0, "grpc_port": 0, "drain_timeout": 1.0, **options}))
    log = folder / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "espalier.deploy", "serve", "--config", str(config)], stdout=output, stderr=output
        )
    try:
        yield _wait_for_greeting(process, log)
    finally:
        process.terminate()
        try:
            process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_greeting(process: "subprocess.Popen[bytes]", log: Path) -> Served:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"espalier serve ended: {log.read_text()}"
        words = log.read_text().split()
        if "try:" in words:
            return Served(words[words.index("HTTP") + 1], words[words.index("gRPC") + 1], process.pid)
        time.sleep(0.1)
    raise AssertionError(f"espalier serve is not ready after {START_TIMEOUT_S} s: {log.read_text()}")
