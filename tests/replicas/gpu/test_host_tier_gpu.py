"""The host tier on a GPU: every bit comes back over pinned memory, nothing waits for the device, rounds wait for copies, and tokens are those of
prompts that run cold, whatever was evicted meanwhile."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from espalier.deploy.random_model.write import write_random_model
from espalier.replicas.cache import host_copies
from espalier.replicas.cache.host_copies import HostCopies, blocks_view
from espalier.replicas.cache.tier import BlockCopy
from espalier.replicas.config import EngineConfig
from espalier.replicas.engine import Engine
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.group import ShardGroup
from espalier.replicas.open import open_group
from espalier.replicas.request import SamplingParams
from tests.support.engine_runs import EngineRun, running
from tests.support.fake_shard import FakeText
from tests.support.rounds import make_request
from tests.support.waiting import wait_until

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(seed=7, top_p=0.95, max_tokens=24, ignore_eos=True)
PENALIZED = SamplingParams(seed=11, repetition_penalty=1.3, max_tokens=24, ignore_eos=True, logprobs=2)
# With a prompt of 500 tokens it takes every block of a cache of 512.
FILLING = SamplingParams(temperature=0.0, max_tokens=1)
KINDS = {"greedy": GREEDY, "seeded": SEEDED, "penalized": PENALIZED}
# The engine's device; the logic below can be tried out with "cpu" where there is no GPU.
DEVICE = "cuda"


def any_bits(layers: int, blocks: int, heads: int, dim: int) -> Tensor:
    """Keys and values of any bits, NaNs of every kind among them, on the GPU."""
    shape = (2, layers, blocks, heads, 16, dim)
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device="cuda").view(torch.float16)


def saves(count: int) -> list[BlockCopy]:
    return [BlockCopy(index, index, restores=False) for index in range(count)]


def restores(count: int) -> list[BlockCopy]:
    return [BlockCopy(index, index, restores=True) for index in range(count)]


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Torch raises where an operation would wait for the device."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that this is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("part_blocks", "staged"), [(1000, 1000), (5, 7), (1, 1)])
def test_every_bit_comes_back_and_nothing_waits(part_blocks: int, staged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = any_bits(3, 41, 2, 64)
    block_bytes = kv[:, :, 0].numel() * 2
    monkeypatch.setattr(host_copies, "_PART_BYTES", part_blocks * block_bytes)
    monkeypatch.setattr(host_copies, "_STAGING_BYTES", staged * block_bytes)
    before = kv.clone()
    copies = HostCopies(blocks_view(kv), 40, idle_block=40)
    assert copies.made is not None
    torch.cuda.synchronize()
    with no_synchronization():
        copies.run(saves(40))
        copies.made.wait()
        kv[:, :, :40].zero_()
        cleared = torch.cuda.Event()  # type: ignore[no-untyped-call]
        cleared.record()
    cleared.synchronize()
    with no_synchronization():
        copies.run(restores(40))
        copies.made.wait()
        after = kv.clone()
    assert torch.equal(after.view(torch.int16), before.view(torch.int16))


def test_memory_that_cannot_be_pinned_is_refused_by_the_options_name(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def limited(*shape: object, **options: object) -> Tensor:
        if options.get("pin_memory"):
            raise RuntimeError("out of memory")
        return empty(*shape, **options)  # type: ignore[call-overload, no-any-return]

    kv = any_bits(1, 3, 1, 64)
    monkeypatch.setattr(torch, "empty", limited)
    with pytest.raises(InvalidRequestError, match="host_kv_gb: 8192 bytes more cannot be pinned: out of memory"):
        HostCopies(blocks_view(kv), 2, idle_block=2)


def test_rounds_wait_for_copies_and_the_host_does_not() -> None:
    """Blocks in the shape of an 8B model, 0.6 GB: enqueued in a fraction of the time that they take."""
    kv = any_bits(36, 257, 8, 128)
    before = kv.clone()
    copies = HostCopies(blocks_view(kv), 256, idle_block=256)
    assert copies.made is not None
    took_s: dict[str, tuple[float, float]] = {}
    for _ in range(2):  # the second time counts
        for name, batch in (("save", saves(256)), ("restore", restores(256))):
            torch.cuda.synchronize()
            started = time.perf_counter()
            copies.run(batch)
            enqueued = time.perf_counter()
            copies.made.synchronize()
            took_s[name] = enqueued - started, time.perf_counter() - started
            if name == "save":
                kv[:, :, :256].zero_()
    num_gb = kv[:, :, :256].numel() * 2 / 1e9
    for name, (enqueue_s, whole_s) in took_s.items():
        print(f"{name}: {num_gb:.2f} GB, enqueued in {enqueue_s * 1e3:.2f} ms, {num_gb / whole_s:.1f} GB/s")
        assert enqueue_s < whole_s / 2
    kv[:, :, :256].zero_()
    torch.cuda.synchronize()
    copies.run(restores(256))
    copies.made.wait()  # of the current stream, which reads next
    assert torch.equal(kv.view(torch.int16), before.view(torch.int16))


def prompt_of(number: int, length: int) -> list[int]:
    return [3 + (number * 131 + position * position * 7 + position) % 500 for position in range(length)]


class Models:
    """Engines over one random checkpoint, and the hash of any request that runs alone and cold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_random_model(folder / "model", "tiny")
        self._hashes: dict[tuple[object, ...], str] = {}

    @contextmanager
    def run(self, **options: object) -> Iterator[EngineRun]:
        values: dict[str, object] = {
            "model_path": self.folder / "model",
            "cache_dir": self.folder / "cache",
            "device": DEVICE,
            "kv_tokens": 512,
            "max_lanes": 8,
            "batch_tokens": 64,
        }
        config = EngineConfig(**(values | options))  # type: ignore[arg-type]
        group: ShardGroup = open_group(config)
        with running(Engine(config, group, FakeText())) as run:
            yield run

    def assert_exact(self, run: EngineRun, *request_ids: str) -> None:
        requests = [run.answers[request_id].request for request_id in request_ids or run.answers]
        missing = [request for request in requests if (request.prompt_token_ids, request.params) not in self._hashes]
        if missing:
            with self.run(max_steps_in_flight=1, prefix_cache=False) as cold:
                for number, request in enumerate(missing):
                    (answer,) = cold.run(replace(request, request_id=f"alone {number}"))
                    self._hashes[request.prompt_token_ids, request.params] = answer.token_sha256
        for request in requests:
            answer = run.answers[request.request_id]
            assert answer.finish is not None and answer.finish.error is None
            expected = self._hashes[request.prompt_token_ids, request.params]
            assert answer.token_sha256 == expected, request.request_id


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("host-tier"))


@pytest.mark.parametrize("tracks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_from_the_host_is_cold(models: Models, kind: str, tracks: int) -> None:
    """Prompts and replies that evict each other from a cache of 512 tokens."""
    params = KINDS[kind]
    with models.run(host_kv_gb=0.05, tracks=tracks) as run:
        for tail in (0, 1, 15, 16, 17, 129):
            prompt = prompt_of(tail, 64 + tail)
            (cold,) = run.run(make_request(f"cold {tail}", prompt, params=params))
            turn = [*prompt, *cold.token_ids, *prompt_of(7, 5)]
            for number in range(2):
                run.run(make_request(f"other {tail} {number}", prompt_of(300 + tail + number, 500), params=FILLING))
                run.run(make_request(f"back {tail} {number}", prompt, params=params))
            run.run(make_request(f"other {tail}", prompt_of(300 + tail, 500), params=FILLING))
            run.run(make_request(f"turn {tail}", turn, params=params))
            finishes = [run.answers[name].finish for name in (f"back {tail} 0", f"back {tail} 1", f"turn {tail}")]
            cached = [finish.usage.cached_tokens for finish in finishes if finish is not None]
            whole = (len(prompt) - 1) // 16 * 16
            # A reply's last token is computed by the next turn.
            assert cached == [whole, whole, (len(prompt) + len(cold.token_ids) - 1) // 16 * 16]
        stats = run.engine.stats()
        assert stats.prefix_host_hits == 16 * stats.host_restores > 0.9 * stats.prefix_hits
        assert 0 < stats.host_saves <= stats.host_blocks_used and stats.host_evictions == 0
        models.assert_exact(run)
    assert len({answer.token_sha256 for answer in run.answers.values()}) > 10, "replies are worth comparing"


@pytest.mark.parametrize("host_kv_gb", [0.05, 12 / 2**15])
@pytest.mark.parametrize(("tracks", "cuda_graphs"), [(1, True), (2, True), (2, False)])
def test_a_crowd_that_evicts_its_own_prefixes_is_exact(
    models: Models, tracks: int, cuda_graphs: bool, host_kv_gb: float
) -> None:
    """With room for all on the host, and for some blocks; some of the crowd leave. Nothing is held when all have ended."""
    with models.run(kv_tokens=256, tracks=tracks, cuda_graphs=cuda_graphs, host_kv_gb=host_kv_gb) as run:
        for wave in range(8):
            for i in range(8):
                params = replace(SEEDED if i % 2 else GREEDY, max_tokens=40)
                run.submit(make_request(f"{wave}.{i}", prompt_of(i % 6, 90 + 3 * i), params=params))
            run.engine.abort(f"{wave}.6")
            run.wait_tokens(f"{wave}.7", 3)
            run.engine.abort(f"{wave}.7")
            run.wait()
        models.assert_exact(run, *(f"{wave}.{i}" for wave in range(8) for i in range(6)))
        stats, scheduler = run.engine.stats(), run.engine._scheduler
        assert stats.host_restores > 0 and (stats.host_evictions > 0) == (host_kv_gb < 0.01)
        wait_until(lambda: scheduler.pool.num_free == scheduler.pool.num_blocks, "all blocks are free")
        scheduler.check()
        assert scheduler.pool.host.num_claimed == 0
