"""DeviceShardGroup: a GPU's shard behind the group's interface. One thread launches steps, one more a track waits for their results."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

import torch

from espalier.replicas.schedule.step import Step, StepCommit, StepResult
from espalier.replicas.shard_info import ShardInfo
from espalier.replicas.stats import DeviceFigures

Launched = TypeVar("Launched")


class Launcher(Protocol[Launched]):
    """What the group asks of a shard; implemented by espalier.replicas.gpu.shard.GpuShard."""

    @property
    def device(self) -> torch.device: ...

    @property
    def info(self) -> ShardInfo: ...

    def launch(self, step: Step) -> Launched: ...

    def finish(self, launched: Launched) -> StepResult: ...

    def commit(self, commit: StepCommit) -> None: ...

    def figures(self) -> DeviceFigures: ...


class DeviceShardGroup(Generic[Launched]):
    """Steps are launched in the order in which they come, and the next is launched while they run."""

    def __init__(self, shard: Launcher[Launched]) -> None:
        self._shard = shard
        self._launcher = self._threads("launch")
        self._waiters: dict[str, ThreadPoolExecutor] = {}

    @property
    def info(self) -> ShardInfo:
        """The shard's own."""
        return self._shard.info

    def submit(self, step: Step) -> Future[StepResult]:
        """Launches the step, after those before it."""
        result: Future[StepResult] = Future()
        launching = self._launcher.submit(self._launch, step, result)
        launching.add_done_callback(lambda done: _follow(done, result))
        return result

    def commit(self, commit: StepCommit) -> None:
        """In order with the steps."""
        self._launcher.submit(self._shard.commit, commit)

    def figures(self) -> DeviceFigures | None:
        """The shard's own."""
        return self._shard.figures()

    def close(self) -> None:
        """Lets what was launched finish, and drops the others."""
        self._launcher.shutdown(wait=False, cancel_futures=True)
        for waiter in list(self._waiters.values()):
            waiter.shutdown(wait=False)

    def _launch(self, step: Step, result: Future[StepResult]) -> None:
        launched = self._shard.launch(step)
        if step.track not in self._waiters:
            self._waiters[step.track] = self._threads(f"wait-{step.track}")
        waiting = self._waiters[step.track].submit(self._finish, launched, result)
        waiting.add_done_callback(lambda done: _follow(done, result))

    def _finish(self, launched: Launched, result: Future[StepResult]) -> None:
        result.set_result(self._shard.finish(launched))

    def _threads(self, name: str) -> ThreadPoolExecutor:
        def choose_device() -> None:
            if self._shard.device.type == "cuda":
                torch.cuda.set_device(self._shard.device)

        return ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=choose_device)


def _follow(done: "Future[None]", result: Future[StepResult]) -> None:
    """What ends the work on a step without a result ends the wait for it."""
    if done.cancelled():
        result.cancel()
    elif (error := done.exception()) is not None:
        result.set_exception(error)
