"""Collects what an engine reports, and holds every reply to the rules of events: no gaps, one finish, nothing after it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from espalier.replicas.engine import Engine
from espalier.replicas.report import Load, RoundReport
from espalier.replicas.request import Finish, Request, TokenEvent, TokenLogprobs
from espalier.replicas.token_hash import token_sha256

TIMEOUT_S = 60.0


@dataclass
class Answer:
    """One reply as it came, put together."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def token_sha256(self) -> str:
        """The hash of a reply that ended."""
        assert self.finish is not None
        return self.finish.token_sha256


class EngineRun:
    """An engine that is started, and the replies that it has given so far. Broken rules of the event stream are kept in `violations`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[str, Answer] = {}
        self.loads: list[Load] = []
        self.violations: list[str] = []
        self._changed = threading.Condition()
        engine.start(self._sink)

    def _sink(self, report: RoundReport) -> None:
        with self._changed:
            self.loads.append(report.load)
            for event in report.events:
                self._take(event)
            self._changed.notify_all()

    def _take(self, event: TokenEvent) -> None:
        answer = self.answers[event.request_id]
        if answer.finish is not None:
            self.violations.append(f"{event.request_id}: an event after its finish")
        if event.first_index != len(answer.request.emitted_token_ids) + len(answer.token_ids):
            self.violations.append(
                f"{event.request_id}: index {event.first_index} after {len(answer.token_ids)} tokens"
            )
        answer.token_ids += event.token_ids
        answer.text += event.text
        answer.logprobs += event.logprobs or ()
        answer.finish = event.finish
        if event.finish is not None:
            whole = [*answer.request.emitted_token_ids, *answer.token_ids]
            if event.finish.token_sha256 != token_sha256(whole):
                self.violations.append(f"{event.request_id}: its hash is not that of its tokens")

    def submit(self, *requests: Request) -> None:
        for request in requests:
            with self._changed:
                assert request.request_id not in self.answers
                self.answers[request.request_id] = Answer(request)
            self.engine.submit(request)

    def wait_tokens(self, request_id: str, count: int) -> None:
        """Until that reply has so many tokens or has ended."""
        answer = self.answers[request_id]
        with self._changed:
            done = self._changed.wait_for(
                lambda: len(answer.token_ids) >= count or answer.finish is not None, TIMEOUT_S
            )
        assert done, f"{request_id}: {len(answer.token_ids)} tokens, {count} wanted"

    def wait(self, *request_ids: str) -> list[Answer]:
        """Until these (all, when none is named) have ended."""
        answers = [self.answers[request_id] for request_id in request_ids or self.answers]
        with self._changed:
            done = self._changed.wait_for(lambda: all(answer.finish for answer in answers), TIMEOUT_S)
        assert done, [answer.request.request_id for answer in answers if answer.finish is None]
        return answers

    def run(self, *requests: Request) -> list[Answer]:
        """Submits all at once and waits for all."""
        self.submit(*requests)
        return self.wait(*(request.request_id for request in requests))


@contextmanager
def running(engine: Engine) -> Iterator[EngineRun]:
    """The engine started; stopped at the end, with the rules of events checked."""
    run = EngineRun(engine)
    try:
        yield run
    finally:
        engine.stop()
    assert run.violations == []
    assert all(answer.finish is not None for answer in run.answers.values()), "a request was lost"
