"""Free memory of a device is taken for true when nobody is giving any back."""

import pytest

from espalier.replicas.gpu.free_memory import settled_memory


class Device:
    """free: by second, the last one for ever."""

    def __init__(self, *free: int) -> None:
        self._free = free
        self.now = 0.0

    def measure(self) -> tuple[int, int]:
        return self._free[min(int(self.now), len(self._free) - 1)], 100

    def settled(self, share: float) -> int:
        def sleep(seconds: float) -> None:
            self.now += seconds

        return settled_memory(self.measure, share, clock=lambda: self.now, sleep=sleep)[0]


def test_enough_is_taken_at_once() -> None:
    device = Device(90, 0)
    assert (device.settled(0.9), device.now) == (90, 0.0)


@pytest.mark.parametrize(("free", "expected", "seconds"), [((5, 5, 95), 95, 2), ((5, 40, 50), 50, 5), ((50,), 50, 3)])
def test_what_is_given_back_is_waited_for(free: tuple[int, ...], expected: int, seconds: int) -> None:
    device = Device(*free)
    assert (device.settled(0.9), device.now) == (expected, seconds)


def test_what_never_settles_is_not_waited_for_long() -> None:
    device = Device(*range(80))
    device.settled(0.9)
    assert device.now == 30
