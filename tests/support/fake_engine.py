"""A ReplicaEngine without a model: it counts upwards from the prompt's last token, one token a round and request, until max_tokens.

Rounds run on a thread of its own, or by hand with `round()` when it was not given a period.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from espalier.cluster.catalog import ServedText
from espalier.cluster.config import ServedModel
from espalier.replicas.errors import EngineError
from espalier.replicas.report import Load, RoundReport
from espalier.replicas.request import Finish, FinishReason, Request, Timings, TokenEvent, Usage
from espalier.replicas.shard_info import ShardInfo
from espalier.replicas.stats import EngineStats
from espalier.replicas.token_hash import token_sha256
from tests.support.fakes import FakeText

VOCAB_SIZE = 512
INFO = ShardInfo(
    num_blocks=64,
    block_size=16,
    max_context=1024,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(256,),
    weights_id="fake",
    numerics_id="fake",
    quantization="none",
)


def reply_of(request: Request) -> list[int]:
    """The whole reply to a request."""
    last = request.prompt_token_ids[-1]
    return [(last + 1 + i) % VOCAB_SIZE for i in range(request.params.max_tokens)]


@dataclass
class _Running:
    request: Request
    sent: int = 0
    reply: list[int] = field(default_factory=list)


class FakeEngine:
    """refuse: raised by every submit. reply_of: what it says to a request. stuck: reports itself unhealthy.

    period_s: seconds a round; None leaves the rounds to the caller.
    """

    def __init__(self, period_s: float | None = None) -> None:
        self.refuse: EngineError | None = None
        self.reply_of = reply_of
        self.stuck = False
        self.aborted: list[str] = []
        self.submitted: list[Request] = []
        self._period_s = period_s
        self._sink: Callable[[RoundReport], None] | None = None
        self._running: dict[str, _Running] = {}
        self._lock = threading.Lock()
        self._round_id = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self, sink: Callable[[RoundReport], None]) -> None:
        self._sink = sink
        if self._period_s is not None:
            self._thread.start()

    def submit(self, request: Request) -> None:
        if self.refuse is not None:
            raise self.refuse
        with self._lock:
            self.submitted.append(request)
            self._running[request.request_id] = _Running(request, reply=self.reply_of(request))

    def abort(self, request_id: str) -> bool:
        with self._lock:
            self.aborted.append(request_id)
            return self._running.pop(request_id, None) is not None

    def load(self) -> Load:
        with self._lock:
            outstanding = sum(len(running.reply) - running.sent for running in self._running.values())
            used = len(self._running)
            return Load(
                running=used,
                waiting=0,
                outstanding_tokens=outstanding,
                free_blocks=INFO.num_blocks - used,
                total_blocks=INFO.num_blocks,
                round_id=self._round_id,
                draining=False,
            )

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._running), steps=self._round_id)

    def healthy(self) -> bool:
        return not self.stuck

    def stop(self) -> None:
        self._stopped.set()

    def round(self) -> None:
        """One token for every running request."""
        with self._lock:
            self._round_id += 1
            events = tuple(self._advance(running) for running in list(self._running.values()))
        if events and self._sink is not None:
            self._sink(RoundReport(events, self.load()))

    def _advance(self, running: _Running) -> TokenEvent:
        request, at = running.request, running.sent
        running.sent += 1
        finish = None
        if running.sent == len(running.reply):
            del self._running[request.request_id]
            finish = Finish(
                FinishReason.LENGTH,
                Usage(len(request.prompt_token_ids), len(running.reply), 0),
                token_sha256(running.reply),
                Timings(0.0, 0.0, 0.0),
            )
        token = running.reply[at]
        return TokenEvent(request.request_id, request.attempt, at, (token,), chr(65 + token % 26), finish=finish)

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            self.round()


def load_fake_engine(model: ServedModel) -> tuple[FakeEngine, ShardInfo]:
    """A replica.LoadEngine: 5 ms a round."""
    return FakeEngine(period_s=0.005), INFO


def load_fake_text(model: ServedModel) -> ServedText:
    """A gateway_server.LoadText."""
    return ServedText(text=FakeText(), failure=None, defaults={}, created=1_700_000_000)
