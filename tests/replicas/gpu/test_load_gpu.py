"""On a GPU: the same network as on the CPU, with no more memory on the way than one group's tensors need."""

import time
from pathlib import Path

import pytest
import torch

from espalier.deploy.random_model.write import write_random_model
from espalier.kernels.linear.group import LinearGroup
from espalier.replicas.gpu import staging
from espalier.replicas.gpu.load import load_network
from espalier.replicas.gpu.memory import _tensors, network_bytes
from espalier.replicas.model.checkpoint import open_checkpoint

pytestmark = pytest.mark.gpu
CONTEXT = 1000


@pytest.mark.parametrize("bits", [3.5, 4])
@pytest.mark.parametrize("buffer_bytes", [10_000, staging.BUFFER_BYTES])
def test_it_is_the_network_that_the_cpu_loads(
    bits: float, buffer_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "BUFFER_BYTES", buffer_bytes)
    checkpoint = write_random_model(tmp_path / "model", "tiny", bits=bits)
    cpu = load_network(checkpoint, torch.device("cpu"), CONTEXT)
    gpu = load_network(checkpoint, torch.device("cuda"), CONTEXT)
    pairs = list(zip(_tensors(gpu), _tensors(cpu), strict=True))
    assert len(pairs) == 39
    for on_gpu, on_cpu in pairs:
        assert on_gpu.is_cuda and on_gpu.dtype == on_cpu.dtype and torch.equal(on_gpu.cpu(), on_cpu)
    assert network_bytes(gpu) == network_bytes(cpu)


def test_memory_and_time_of_large_layers(tmp_path: Path) -> None:
    """Two layers and the head of the 8B shape, 2.0 GB, from page cache."""
    checkpoint = write_random_model(tmp_path / "model", "qwen3-8b", layers=2)
    size = sum(entry.end - entry.begin for entry in checkpoint.needed())
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, requested = torch.cuda.memory_allocated(), _requested()
    torch.cuda.reset_peak_memory_stats()
    started = time.monotonic()
    network = load_network(open_checkpoint(checkpoint.path), torch.device("cuda"), CONTEXT)
    elapsed = time.monotonic() - started
    held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    foretold = network_bytes(network)
    print(f"{size / 1e9:.2f} GB in {elapsed:.2f} s ({size / 1e9 / elapsed:.1f} GB/s), peak {peak / 1e9:.2f} GB")
    # The allocator hands out up to 1 MiB more than a large tensor asks for, so what was asked for is compared.
    assert foretold <= _requested() - requested < foretold + (1 << 20)
    assert held < foretold + (1 << 20) * len(list(_tensors(network)))
    assert isinstance(network.head, LinearGroup)
    head = network.head.runs[0].words.nbytes
    # The head comes first: the embedding, the head as read, joined and packed, and the rearrangement's intermediates.
    assert peak <= max(held, network.embedding.nbytes + 3 * head) + (512 << 20)
    assert elapsed < 15


def _requested() -> int:
    """Bytes that tensors alive asked for."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])
