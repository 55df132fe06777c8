"""A ShardGroup over a fake shard that runs each track on a thread of its own, as streams of a device would: changes are taken over in the order of
submission, rows of one track in order, and rows of two tracks in any."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from espalier.replicas.schedule.step import Step, StepCommit, StepResult
from espalier.replicas.shard_info import ShardInfo
from espalier.replicas.stats import DeviceFigures
from tests.support.fake_shard import FakeShard


class Hold:
    """Lets a test keep one track's steps from running. Waits are bounded."""

    def __init__(self, track: str) -> None:
        self._track = track
        self._open = threading.Event()
        self._open.set()
        self.holds = threading.Event()

    def close(self) -> None:
        self.holds.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def wait(self, step: Step) -> None:
        """Called before each step, on its track's thread."""
        if step.track == self._track and not self._open.is_set():
            self.holds.set()
            assert self._open.wait(60.0)


class TrackedGroup:
    """figures: what the devices count. hold: which track waits, if any."""

    def __init__(self, shard: FakeShard, *, hold: Hold | None = None, figures: DeviceFigures | None = None) -> None:
        self._shard = shard
        self._hold = hold
        self._figures = figures
        self._lock = threading.Lock()  # the fake shard is one thing at a time
        self._workers: dict[str, ThreadPoolExecutor] = {}

    @property
    def info(self) -> ShardInfo:
        return self._shard.info

    def submit(self, step: Step) -> Future[StepResult]:
        with self._lock:
            self._shard.take_over(step)
        worker = self._workers.setdefault(step.track, ThreadPoolExecutor(max_workers=1))
        return worker.submit(self._execute, step)

    def _execute(self, step: Step) -> StepResult:
        if self._hold is not None:
            self._hold.wait(step)
        with self._lock:
            return self._shard.execute(step)

    def commit(self, commit: StepCommit) -> None:
        with self._lock:
            self._shard.commit(commit)

    def figures(self) -> DeviceFigures | None:
        return self._figures

    def close(self) -> None:
        for worker in self._workers.values():
            worker.shutdown(wait=False, cancel_futures=True)
