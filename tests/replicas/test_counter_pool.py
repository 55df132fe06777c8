"""CounterPool on a CPU's stand-in, with allocations and memsets counted: one a growth, none a call; poison found; nothing moves when sealed."""

import pytest
import torch
from torch import Tensor

from espalier.kernels.counters import ScratchSize
from espalier.replicas.streams.counters import CounterPool, PoolFigures

CPU = torch.device("cpu")


class CountedMemory:
    """Counts, and hands out memory full of rubbish."""

    def __init__(self) -> None:
        self.allocations = 0
        self.memsets = 0

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        self.allocations += 1
        return torch.full((num_bytes,), 0xA5, dtype=torch.uint8, device=device)

    def zero(self, tensor: Tensor) -> None:
        self.memsets += 1
        tensor.zero_()

    @property
    def counts(self) -> tuple[int, int]:
        return self.allocations, self.memsets


@pytest.fixture
def memory() -> CountedMemory:
    return CountedMemory()


@pytest.fixture
def pool(memory: CountedMemory) -> CounterPool:
    return CounterPool(CPU, None, allocate=memory.allocate, zero=memory.zero)


def test_a_growth_allocates_once_and_clears_the_counters_once(pool: CounterPool, memory: CountedMemory) -> None:
    assert memory.counts == (0, 0)
    scratch = pool.reserve(ScratchSize(counters=63, partials=500))
    assert memory.counts == (1, 1)
    assert scratch.counters.dtype == torch.int32
    assert scratch.counters.tolist() == [0] * 63
    assert scratch.partials.dtype == torch.float32
    assert scratch.partials.numel() == 500
    assert scratch.partials.data_ptr() % 16 == 0
    pool.reserve(ScratchSize(counters=64, partials=500))
    assert memory.counts == (2, 2)
    assert pool.scratch.counters.tolist() == [0] * 64


def test_calls_allocate_and_clear_nothing(pool: CounterPool, memory: CountedMemory) -> None:
    first = pool.reserve(ScratchSize(counters=64, partials=512))
    for _ in range(1000):
        assert pool.scratch is first
        assert pool.reserve(ScratchSize(counters=8, partials=512)) is first
    assert memory.counts == (1, 1)


def test_a_pool_serves_the_largest_of_each(pool: CounterPool) -> None:
    pool.reserve(ScratchSize(counters=100, partials=0))
    pool.reserve(ScratchSize(counters=1, partials=1000))
    assert pool.size == ScratchSize(counters=100, partials=1000)
    pool.scratch.require(ScratchSize(counters=100, partials=1000))
    with pytest.raises(AssertionError, match="101 counters needed, 100 reserved"):
        pool.scratch.require(ScratchSize(counters=101))


def test_partials_and_counters_do_not_overlap(pool: CounterPool) -> None:
    scratch = pool.reserve(ScratchSize(counters=65, partials=10))
    scratch.partials.fill_(float("nan"))
    assert scratch.counters.tolist() == [0] * 65


def test_poison_is_found_and_cleared_once(pool: CounterPool, memory: CountedMemory) -> None:
    pool.reserve(ScratchSize(counters=64, partials=16))
    assert pool.check()
    pool.scratch.counters[63] = 3  # as a launch does that dies between its first arrival and its last
    assert not pool.check()
    assert pool.scratch.counters.tolist() == [0] * 64
    assert pool.check()
    assert memory.counts == (1, 2)
    assert pool.figures == PoolFigures(num_bytes=256 + 64, growths=1, poison_resets=1)


def test_a_negative_counter_is_poison(pool: CounterPool) -> None:
    pool.reserve(ScratchSize(counters=4))
    pool.scratch.counters[:2] = torch.tensor([1, -1], dtype=torch.int32)
    assert not pool.check()


def test_partials_may_hold_anything(pool: CounterPool) -> None:
    pool.reserve(ScratchSize(counters=4, partials=4)).partials.fill_(float("nan"))
    assert pool.check()


def test_a_sealed_pool_stays_where_it_is(pool: CounterPool, memory: CountedMemory) -> None:
    first = pool.reserve(ScratchSize(counters=64, partials=16))
    pool.seal()
    assert pool.reserve(ScratchSize(counters=64, partials=16)) is first
    with pytest.raises(RuntimeError, match=r"counters=65.*counters=64, partials=16"):
        pool.reserve(ScratchSize(counters=65))
    assert memory.counts == (1, 1)
    assert pool.scratch is first


def test_an_empty_pool_is_clean(pool: CounterPool, memory: CountedMemory) -> None:
    assert pool.check()
    assert pool.figures == PoolFigures(num_bytes=0, growths=0, poison_resets=0)
    assert memory.counts == (0, 0)


def test_the_stream_fits_the_device() -> None:
    with pytest.raises(ValueError, match="stream: a pool on cuda"):
        CounterPool(torch.device("cuda"), None)


class CapturedPool(CounterPool):
    """A pool whose stream is captured while `capturing` is set."""

    capturing = False

    def _capturing(self) -> bool:
        return self.capturing


def test_a_capture_allocates_and_clears_nothing(memory: CountedMemory) -> None:
    pool = CapturedPool(CPU, None, allocate=memory.allocate, zero=memory.zero)
    pool.capturing = True
    with pytest.raises(RuntimeError, match="capture"):
        pool.reserve(ScratchSize(counters=1))
    with pytest.raises(RuntimeError, match="capture"):
        pool.check()
    assert memory.counts == (0, 0)


def test_scratch_taken_inside_a_capture_seals_the_pool(memory: CountedMemory) -> None:
    pool = CapturedPool(CPU, None, allocate=memory.allocate, zero=memory.zero)
    pool.reserve(ScratchSize(counters=1))
    assert pool.scratch.counters.numel() == 1
    pool.reserve(ScratchSize(counters=2))
    pool.capturing = True
    held = pool.scratch
    pool.capturing = False
    with pytest.raises(RuntimeError, match="graphs hold"):
        pool.reserve(ScratchSize(counters=3))
    assert pool.scratch is held
