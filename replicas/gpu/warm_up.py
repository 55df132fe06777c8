"""WarmUp: at a model's first start other processes compile its kernels while this one reads its weights. Otherwise it does nothing.

What they compile goes to Triton's cache on disk, where this process finds it when it prepares its rounds; what is missing there it compiles
then, as if there were no warm-up. So nothing here may fail a load: it costs one line of the log. Knows no kernel (`compile_rounds.py`).
"""

import hashlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from espalier.kernels import ahead
from espalier.kernels.device import DeviceClass
from espalier.replicas.cpus import usable_cpus
from espalier.replicas.gpu.rounds import RoundShapes
from espalier.replicas.model.checkpoint import Checkpoint

# With more processes, the kernel that takes longest decides.
MAX_PROCESSES = 16
# Longer than one core takes: what is not done then hangs.
_PATIENCE_S = 180.0
_COMMAND = (sys.executable, "-m", "espalier.replicas.gpu.compile_rounds")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rounds:
    """What decides which kernels a model's rounds launch.

    shapes: of each track. kv_dtype: of keys and values. max_context: positions of the rotary tables. device: what they will run on.
    """

    model_path: Path
    shapes: tuple[RoundShapes, ...]
    max_lanes: int
    block_size: int
    kv_dtype: torch.dtype
    max_context: int
    device: DeviceClass


@dataclass(frozen=True, slots=True)
class Report:
    """What the processes did. kernels: compiled, or found in the cache. failures: of the others, what went wrong."""

    kernels: int
    failures: list[str]


class WarmUp:
    """One start's. `begin` it before weights are read, `wait` for it before the first kernel, `remember` that rounds are prepared."""

    def __init__(self, mark: Path | None, process: subprocess.Popen[bytes] | None, num_processes: int) -> None:
        self._mark = mark
        self._process = process
        self._num_processes = num_processes
        self._began = time.monotonic()

    @staticmethod
    def begin(rounds: Rounds, checkpoint: Checkpoint) -> "WarmUp":
        """Starts the processes, unless an earlier start has left everything in the cache, or nothing can be left there."""
        cache = ahead.cache_folder()
        mark = cache / f"espalier-{kernels_id(rounds, checkpoint)}"
        num_processes = min(usable_cpus() - 1, MAX_PROCESSES)
        is_compiled = rounds.device.capability > (0, 0)  # and not interpreted
        if not is_compiled or mark.exists() or num_processes < 1 or not _is_writable(cache):
            return WarmUp(None, None, 0)
        try:
            process = _start(rounds, num_processes)
        except OSError as error:
            logger.warning("kernels are compiled by one process: no other can be started: %s", error)
            process = None
        return WarmUp(mark, process, num_processes)

    def wait(self) -> None:
        """Until the processes are done. Says in the log how many kernels they compiled and how long it took, or what went wrong."""
        if self._process is None:
            return
        try:
            output, errors = self._process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._stop()
            logger.warning("kernels were not compiled ahead within %.0f s; the rest is compiled now", _PATIENCE_S)
            return
        try:
            report = Report(**json.loads(output.splitlines()[-1]))
        except (ValueError, TypeError, IndexError):
            lines = errors.decode(errors="replace").split("\n")
            reason = next((line for line in reversed(lines) if line.strip()), f"exit code {self._process.returncode}")
            logger.warning("kernels were not compiled ahead: %s; they are compiled now", reason)
            return
        seconds = time.monotonic() - self._began
        logger.info("%d kernels compiled ahead in %.1f s, %d at a time", report.kernels, seconds, self._num_processes)
        if report.failures:
            failures = report.failures
            logger.warning(
                "%d more could not be compiled ahead, such as %s; they are compiled now", len(failures), failures[0]
            )

    def remember(self) -> None:
        """All rounds are prepared, so every kernel is in the cache, whoever compiled it: the next start looks for nothing."""
        if self._mark is None:
            return
        try:
            self._mark.touch()
        except OSError as error:
            logger.warning(
                "%s cannot be written: %s; the next start looks for its kernels again", self._mark, error.strerror
            )

    def _stop(self) -> None:
        """Ends the processes, done or not."""
        if self._process is None:
            return
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


def kernels_id(rounds: Rounds, checkpoint: Checkpoint) -> str:
    """Names what kernels there are and what they are compiled from: shapes of the model and its rounds, device, code, compiler."""
    sha = hashlib.sha256()
    sha.update((checkpoint.path / "config.json").read_bytes())
    for header in checkpoint.headers:
        sha.update(header.raw)
    described = (rounds.shapes, rounds.max_lanes, rounds.block_size, rounds.kv_dtype, rounds.max_context, rounds.device)
    environment = sorted((name, value) for name, value in os.environ.items() if name.startswith("TRITON_"))
    sha.update(repr((described, ahead.compiler(), sys.version, environment)).encode())
    for folder in (Path(ahead.__file__).parent, Path(__file__).parent):
        for file in sorted(folder.rglob("*.py")):
            sha.update(file.read_bytes())
    return sha.hexdigest()[:32]


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _start(rounds: Rounds, num_processes: int) -> subprocess.Popen[bytes]:
    """Raises OSError."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "CUDA_VISIBLE_DEVICES": "",  # they take nothing of the device's memory
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryFile() as given:
        pickle.dump((rounds, num_processes), given)
        given.seek(0)
        return subprocess.Popen(
            _COMMAND,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # so that `_stop` reaches those that it starts
        )
