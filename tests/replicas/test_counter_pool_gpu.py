"""CounterPool under real launches: nothing allocated or cleared by a call or a capture, poison found, two streams with bits as if alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from espalier.kernels.counters import Scratch, ScratchSize
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.linear.exl3_linear import allocate_rotated, exl3_linear, scratch_size
from espalier.kernels.linear.group import LinearGroup, pack_group
from espalier.replicas.streams.counters import CounterPool
from tests.support.linears import move, random_linear

pytestmark = pytest.mark.gpu

# Few programs, many splits: two of these fit the device at once. So few rows that no program waits for another: two launches that share a
# counter would wait for ever.
NUM_IN, NUM_OUT, ROWS = 4096, 512, 8
CALLS, REPLAYS = 50, 20
# More than the splits of a sum: no later launch finds its last arrival, and none brings the counter back to zero.
LEFT_BEHIND = 100


@dataclass(frozen=True)
class Layer:
    """A linear, one input for it, and where its results go."""

    group: LinearGroup
    x: Tensor
    rotated: Tensor
    out: Tensor

    @property
    def size(self) -> ScratchSize:
        return scratch_size(self.group, ROWS)

    def call(self, scratch: Scratch) -> Tensor:
        return exl3_linear(self.x, self.group, scratch, out=self.out, rotated=self.rotated)


def make_layer(seed: int) -> Layer:
    group = pack_group([move(random_linear(NUM_IN, NUM_OUT, 4.0, Codebook.MUL1, seed), "cuda")], [None])
    x = torch.randn(ROWS, NUM_IN, generator=torch.Generator().manual_seed(seed)).half().cuda()
    out = torch.full((ROWS, NUM_OUT), float("nan"), dtype=torch.float32, device="cuda")
    return Layer(group, x, allocate_rotated(group, ROWS), out)


def make_pool(layer: Layer) -> CounterPool:
    pool = CounterPool(torch.device("cuda", torch.cuda.current_device()), torch.cuda.Stream())
    pool.reserve(layer.size)
    torch.cuda.synchronize()  # inputs were made on another stream
    return pool


def solo(layer: Layer) -> Tensor:
    """The layer's result with nothing else on the device."""
    pool = make_pool(layer)
    with torch.cuda.stream(pool.stream):
        result = layer.call(pool.scratch).clone()
    torch.cuda.synchronize()
    assert torch.isfinite(result).all()
    return result


def device_work(work: Callable[[], object]) -> list[str]:
    """Names of what ran on the device: kernels, copies, memsets."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:  # without it, it warns
        work()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def clears(names: list[str]) -> list[str]:
    return [name for name in names if "memset" in name.lower() or "fill" in name.lower()]


def allocations() -> int:
    return torch.cuda.memory_stats()["allocation.all.allocated"]


def test_one_clear_a_growth_and_none_a_call() -> None:
    layer = make_layer(0)
    pool = make_pool(layer)
    layer.call(pool.scratch)  # compiles
    grown = device_work(lambda: pool.reserve(ScratchSize(counters=pool.size.counters + 1, partials=pool.size.partials)))
    assert len(clears(grown)) == len(grown) == 1
    before = allocations()
    with torch.cuda.stream(pool.stream):
        called = device_work(lambda: [layer.call(pool.scratch) for _ in range(20)])
    assert allocations() == before
    assert len(called) >= 20
    assert clears(called) == []
    assert pool.check()
    assert (pool.figures.growths, pool.figures.poison_resets) == (2, 0)


def test_a_captured_graph_allocates_and_clears_nothing() -> None:
    layer = make_layer(1)
    expected = solo(layer)
    pool = make_pool(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=pool.stream):
        before = allocations()
        with pytest.raises(RuntimeError, match="capture"):
            pool.reserve(layer.size)
        layer.call(pool.scratch)
        allocated = allocations() - before
    assert allocated == 0
    with pytest.raises(RuntimeError, match="graphs hold"):
        pool.reserve(ScratchSize(counters=pool.size.counters + 1))
    layer.out.fill_(float("nan"))
    torch.cuda.synchronize()

    def replay() -> None:
        with torch.cuda.stream(pool.stream):
            graph.replay()

    assert clears(device_work(replay)) == []
    assert torch.equal(layer.out, expected)


def test_poison_spoils_a_sum_until_it_is_cleared() -> None:
    layer = make_layer(2)
    expected = solo(layer)
    pool = make_pool(layer)
    assert pool.size.counters > 0, "a launch without counters cannot be poisoned"
    with torch.cuda.stream(pool.stream):
        pool.scratch.counters.fill_(LEFT_BEHIND)
        layer.out.fill_(float("nan"))
        layer.call(pool.scratch)
    assert not pool.check()
    assert torch.isnan(layer.out).all()
    assert pool.check()
    with torch.cuda.stream(pool.stream):
        layer.out.fill_(float("nan"))
        layer.call(pool.scratch)
    assert pool.check()
    assert torch.equal(layer.out, expected)
    assert pool.figures.poison_resets == 1


def test_one_counter_left_behind_is_found() -> None:
    pool = make_pool(make_layer(3))
    with torch.cuda.stream(pool.stream):
        pool.scratch.counters[-1:].fill_(-1)
    assert not pool.check()
    assert not bool(pool.scratch.counters.any())


def wrong_values(
    layers: Sequence[Layer], scratches: Sequence[Scratch], streams: Sequence[torch.cuda.Stream]
) -> list[int]:
    """1,000 calls of each layer on its stream, all streams at once: values that differ from the layer's alone.

    Graphs of 50 calls, each compared on the device before the next overwrites it.
    """
    expected = [solo(layer) for layer in layers]
    counts = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in layers]
    torch.cuda.synchronize()
    graphs = []
    for layer, right, scratch, stream, count in zip(layers, expected, scratches, streams, counts, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                layer.out.fill_(float("nan"))
                layer.call(scratch)
                count += (layer.out != right).sum()
        graphs.append(graph)
    for _ in range(REPLAYS):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    return [int(count) for count in counts]


def test_two_streams_at_once_have_the_bits_of_one_alone() -> None:
    layers = [make_layer(4), make_layer(5)]
    pools = [make_pool(layer) for layer in layers]
    assert wrong_values(layers, [pool.scratch for pool in pools], [pool.stream for pool in pools]) == [0, 0]
    assert [pool.check() for pool in pools] == [True, True]


def test_one_pool_on_two_streams_is_a_race() -> None:
    """What pools of their own prevent, and proof that the test above would see it."""
    layers = [make_layer(6), make_layer(7)]
    pools = [make_pool(layer) for layer in layers]
    assert sum(wrong_values(layers, [pools[0].scratch] * 2, [pool.stream for pool in pools])) > 0
