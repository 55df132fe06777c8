"""ShardGroup: the shards of one replica behind one interface. Runs steps in the order in which they come. Knows neither plans nor requests."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from espalier.replicas.schedule.step import Step, StepCommit, StepResult
from espalier.replicas.shard_info import ShardInfo
from espalier.replicas.stats import DeviceFigures

logger = logging.getLogger(__name__)


class StepRunner(Protocol):
    """What a group asks of a shard; implemented by espalier.replicas.shard.Shard."""

    @property
    def info(self) -> ShardInfo: ...

    def execute(self, step: Step) -> StepResult: ...

    def commit(self, commit: StepCommit) -> None: ...


class ShardGroup(Protocol):
    """All shards of a replica. Steps and commits take effect in the order of the calls."""

    @property
    def info(self) -> ShardInfo:
        """What the shards are, equal on all of them."""
        ...

    def submit(self, step: Step) -> Future[StepResult]:
        """Starts a step, after those before it. The future raises when the step failed as a whole."""
        ...

    def commit(self, commit: StepCommit) -> None:
        """Tells the shards what of a finished step is kept. A commit that fails makes every later step fail."""
        ...

    def figures(self) -> DeviceFigures | None:
        """What the shards' devices count; None on a CPU."""
        ...

    def close(self) -> None:
        """Starts nothing more; what has not started by now never does. Calling it again changes nothing."""
        ...


class LocalShardGroup:
    """One shard in this process, on a thread of its own, so that the next step is planned while this one runs."""

    def __init__(self, shard: StepRunner) -> None:
        self._shard = shard
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shard")
        self._commit_error: Exception | None = None

    @property
    def info(self) -> ShardInfo:
        """The shard's own."""
        return self._shard.info

    def submit(self, step: Step) -> Future[StepResult]:
        """Runs the step on the shard's thread."""
        return self._worker.submit(self._execute, step)

    def commit(self, commit: StepCommit) -> None:
        """Commits on the shard's thread."""
        self._worker.submit(self._commit, commit)

    def figures(self) -> None:
        """A CPU counts nothing."""

    def close(self) -> None:
        """Lets the step that runs finish, and drops the others."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _execute(self, step: Step) -> StepResult:
        if self._commit_error is not None:
            raise RuntimeError(f"an earlier commit failed: {self._commit_error}")
        return self._shard.execute(step)

    def _commit(self, commit: StepCommit) -> None:
        try:
            self._shard.commit(commit)
        except Exception as error:
            logger.exception("commit of step %d failed", commit.step_id)
            self._commit_error = error
