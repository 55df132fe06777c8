"""Who finishes a block: `arrivals` itself, run as Python, its programs stepped from atomic to atomic in every order that chance finds."""

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.support.sass import needs_triton

pytestmark = needs_triton

MOST_STEPS = 20_000


class Word:
    """A counter in memory. Every access waits for its turn; `step` gives one to a program."""

    def __init__(self) -> None:
        self.value = 0
        self._turns: dict[int, threading.Semaphore] = {}
        self._stopped = threading.Semaphore(0)
        self._mine = threading.local()
        self.ended: list[int] = []
        self.errors: list[BaseException] = []

    def start(self, number: int, work: Callable[[], None]) -> None:
        """A program runs to its first access."""
        self._turns[number] = threading.Semaphore(0)

        def run() -> None:
            self._mine.number = number
            try:
                work()
            except BaseException as error:
                self.errors.append(error)
            self.ended.append(number)
            self._stopped.release()

        threading.Thread(target=run, daemon=True).start()
        self._stopped.acquire()

    def step(self, number: int) -> None:
        """A program makes one access and runs to its next."""
        self._turns[number].release()
        self._stopped.acquire()

    def _access(self, change: Callable[[int], int]) -> int:
        self._stopped.release()
        self._turns[self._mine.number].acquire()
        before = self.value
        self.value = change(before)
        return before

    def atomic_add(self, _: object, amount: int, sem: str) -> int:
        # An arrival shows the sums stored before it, and shows all earlier ones' to whoever waits; the rest only counts.
        assert sem == {1: "acq_rel", 0: "acquire"}.get(amount, "relaxed")
        return self._access(lambda value: value + amount)

    def atomic_xchg(self, _: object, value: int, sem: str) -> int:
        return self._access(lambda _: value)


def launch(
    monkeypatch: pytest.MonkeyPatch, rng: random.Random, *, programs: int, helpers: int, turns: int, places: int
) -> list[tuple[int, int]]:
    """(turn, who finished it) of one launch, of which `places` programs run at a time. They begin in order, as a grid does."""
    from espalier.kernels.linear import arrivals

    word, finished, arrived = Word(), list[tuple[int, int]](), list[int]()
    fake = SimpleNamespace(
        atomic_add=word.atomic_add,
        atomic_xchg=word.atomic_xchg,
        where=lambda chosen, yes, no: yes if chosen else no,
        static_assert=lambda _: None,
    )
    monkeypatch.setattr(arrivals, "gl", fake)

    def program(number: int) -> None:
        arrivals.begin.fn(None, helpers)
        arrived.append(number)  # its sums are stored
        index, count = arrivals.arrive.fn(None, programs, helpers)
        if index >= 0:
            assert len(arrived) == programs, "finished before all sums were there"
            finished.extend((turn, number) for turn in range(index, turns, count))
            arrivals.leave.fn(None, count, helpers)

    waiting, running = list(range(programs)), list[int]()
    for _ in range(MOST_STEPS):
        while waiting and len(running) < places:
            running.append(waiting[0])
            word.start(waiting.pop(0), lambda number=running[-1]: program(number))  # type: ignore[misc]
        running = [number for number in running if number not in word.ended]
        if not running and not waiting:
            break
        if running:
            word.step(rng.choice(running))
    assert not word.errors, word.errors
    assert not running and not waiting, f"programs wait for ever; the word is {word.value:#x}"
    assert word.value == 0
    return finished


@pytest.mark.parametrize("helpers", [1, 2, 4, 8])
@pytest.mark.parametrize("programs", [1, 2, 8, 16])
def test_every_turn_is_finished_once_whatever_the_order(
    programs: int, helpers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    company = 0
    for seed in range(12):
        rng = random.Random(seed)
        turns = rng.randint(1, helpers + 3)
        finished = launch(
            monkeypatch, rng, programs=programs, helpers=helpers, turns=turns, places=rng.randint(1, programs + 3)
        )
        assert sorted(turn for turn, _ in finished) == list(range(turns))
        company += len({number for _, number in finished}) > 1
    assert (company > 0) == (min(programs, helpers) > 1), "programs share the finishing where they may"


def test_a_lone_place_is_never_kept_by_one_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    finished = launch(monkeypatch, random.Random(0), programs=16, helpers=4, turns=4, places=1)
    assert finished == [(turn, 15) for turn in range(4)]
