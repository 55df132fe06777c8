"""The memory plan: its numbers are those of real allocations, it fills what it may, and refuses with numbers."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.replicas.config import EngineConfig
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.gpu import kv, memory
from espalier.replicas.gpu.kv import DeviceKV, max_blocks
from espalier.replicas.gpu.load import load_network
from espalier.replicas.gpu.memory import DevicePlan, network_bytes, plan_device_memory
from espalier.replicas.model.checkpoint import Checkpoint, open_checkpoint
from tests.support.tiny import make_tiny_checkpoint

MIB = 1 << 20
BLOCK = 16
# Of the tiny model's KV in fp16: 2 layers, 2 heads of 64.
TOKEN_BYTES = 2 * 2 * 2 * 64 * 2
ROPE_TOKEN_BYTES = 64 * 4
WORKSPACE, GRAPHS = 3 * MIB, 2 * MIB
POSITIONS = 4096


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("tiny")
    return open_checkpoint(make_tiny_checkpoint(folder, architecture="qwen2", max_positions=POSITIONS))


@pytest.fixture(scope="module")
def bare(checkpoint: Checkpoint) -> int:
    """Bytes of the weights without rotary tables."""
    return network_bytes(load_network(checkpoint, torch.device("cpu"), max_context=1)) - ROPE_TOKEN_BYTES


def plan(
    checkpoint: Checkpoint, total: int, free: int | None = None, workspace: int = WORKSPACE, **options: Any
) -> DevicePlan:
    config = EngineConfig(model_path=checkpoint.path, device="cuda", **({"max_lanes": 4} | options))
    free = total if free is None else free
    return plan_device_memory(
        config, checkpoint, total_bytes=total, free_bytes=free, workspace_bytes=workspace, graphs_bytes=GRAPHS
    )


def refused(option: str, checkpoint: Checkpoint, total: int, free: int | None = None, **options: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        plan(checkpoint, total, free, **options)
    assert caught.value.param == option and caught.value.message.startswith(f"{option}: ")
    return caught.value.message


@pytest.mark.parametrize("max_context", [None, 100, 1024])
@pytest.mark.parametrize("kv_dtype", ["fp16", "bf16"])
def test_the_parts_are_what_is_allocated(checkpoint: Checkpoint, max_context: int | None, kv_dtype: str) -> None:
    made = plan(checkpoint, 1 << 30, max_context=max_context, kv_dtype=kv_dtype)
    network = load_network(checkpoint, torch.device("cpu"), made.max_context)
    assert made.weights_bytes == network_bytes(network)
    cache = DeviceKV(checkpoint.config, made.num_blocks, BLOCK, torch.float16, torch.device("cpu"))
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in cache.keys + cache.values}
    assert made.kv_bytes == sum(storage.nbytes() for storage in storages.values())
    assert (made.workspace_bytes, made.graphs_bytes) == (WORKSPACE, GRAPHS)
    assert made.max_context == (max_context or POSITIONS)


def test_with_much_memory_every_lane_gets_the_longest_context(checkpoint: Checkpoint) -> None:
    assert plan(checkpoint, 1 << 30).num_blocks == 4 * POSITIONS // BLOCK
    assert plan(checkpoint, 1 << 30, max_context=100, max_lanes=3).num_blocks == 3 * 7


@pytest.mark.parametrize("share", [0.3, 0.5, 1.0])
def test_blocks_fill_the_share_to_the_last_that_fits(checkpoint: Checkpoint, bare: int, share: float) -> None:
    total = 60 * MIB
    made = plan(checkpoint, total, memory_share=share, max_context=512, max_lanes=10_000, batch_tokens=10_000)
    left = int(total * share) - bare - 512 * ROPE_TOKEN_BYTES - WORKSPACE - GRAPHS
    assert made.num_blocks + 1 == left // (BLOCK * TOKEN_BYTES)
    assert made.num_bytes <= total * share < made.num_bytes + BLOCK * TOKEN_BYTES


def test_never_more_than_is_free(checkpoint: Checkpoint) -> None:
    alone = plan(checkpoint, 20 * MIB, memory_share=1.0, max_lanes=10_000, batch_tokens=10_000)
    shared = plan(checkpoint, 200 * MIB, 20 * MIB, memory_share=1.0, max_lanes=10_000, batch_tokens=10_000)
    assert shared == alone and shared.num_bytes <= 20 * MIB


def test_the_context_shrinks_to_what_fits(checkpoint: Checkpoint, bare: int) -> None:
    """Its rotary tables shrink with it, and one block more would not fit."""
    for free in range(8 * MIB, 10 * MIB, 50_001):
        made = plan(checkpoint, 1 << 30, free)
        fixed = bare + WORKSPACE + GRAPHS + BLOCK * TOKEN_BYTES
        assert made.max_context == min(POSITIONS, made.num_blocks * BLOCK)
        assert made.weights_bytes == bare + made.max_context * ROPE_TOKEN_BYTES
        assert made.num_bytes <= free
        if made.max_context < POSITIONS:
            more = (made.num_blocks + 1) * BLOCK
            assert fixed + more * (TOKEN_BYTES + ROPE_TOKEN_BYTES) > free
    assert plan(checkpoint, 1 << 30, 8 * MIB).max_context < POSITIONS


def test_growing_memory_never_gives_less(checkpoint: Checkpoint) -> None:
    plans = [plan(checkpoint, 1 << 30, free) for free in range(7 * MIB, 16 * MIB, 70_003)]
    for before, after in itertools.pairwise(plans):
        assert before.max_context <= after.max_context and before.num_blocks <= after.num_blocks
    assert {POSITIONS} < {made.max_context for made in plans}


def test_kv_tokens_is_taken_as_said(checkpoint: Checkpoint, bare: int) -> None:
    made = plan(checkpoint, 1 << 30, kv_tokens=1000)
    assert (made.num_blocks, made.max_context) == (62, 992)
    assert made.kv_bytes == 63 * BLOCK * TOKEN_BYTES
    exact = made.num_bytes
    assert plan(checkpoint, 1 << 30, exact, kv_tokens=1000) == made
    message = refused("kv_tokens", checkpoint, 1 << 30, exact - 1, kv_tokens=1000)
    assert "1000 tokens do not fit" in message
    assert "cache of 992" in refused("max_context", checkpoint, 1 << 30, kv_tokens=1000, max_context=993)


def test_refusals_tell_the_numbers(checkpoint: Checkpoint) -> None:
    GIB = 1 << 30  # noqa: N806
    message = refused("model_path", checkpoint, 80 * GIB, 20 * GIB, workspace=30 * GIB)
    assert "workspace 30.00" in message and "the device has 80.00 GiB, 20.00 free" in message
    message = refused("memory_share", checkpoint, 80 * GIB, 79 * GIB, workspace=30 * GIB, memory_share=0.25)
    assert "weights 0.00" in message and "memory_share 0.25 allows 20.00" in message
    message = refused("max_context", checkpoint, 8 * MIB, max_context=POSITIONS)
    assert f"one sequence of {POSITIONS} tokens does not fit" in message and "KV blocks 0.00" in message
    assert "4096 positions" in refused("max_context", checkpoint, GIB, max_context=POSITIONS + 1)


def test_slots_are_counted_in_32_bits(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    most = max_blocks(checkpoint.config, BLOCK)
    heads = checkpoint.config.num_kv_heads
    assert (most + 1) * heads * BLOCK < 2**31 <= (most + 2) * heads * BLOCK
    tokens = (most + 1) * BLOCK
    assert "kernels" in refused("kv_tokens", checkpoint, 1 << 50, kv_tokens=tokens)
    monkeypatch.setattr(kv, "MAX_SLOTS", 100 * heads * BLOCK)
    assert max_blocks(checkpoint.config, BLOCK) == 98
    assert plan(checkpoint, 1 << 30, max_context=512).num_blocks == 98


def test_a_plan_reads_no_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    entries = {name: dataclasses.replace(entry, file=tmp_path / "gone") for name, entry in checkpoint.entries.items()}
    elsewhere = dataclasses.replace(checkpoint, entries=entries)
    assert plan(elsewhere, 1 << 30) == plan(checkpoint, 1 << 30)


def test_memory_that_is_shared_counts_once(tmp_path: Path) -> None:
    tied = open_checkpoint(make_tiny_checkpoint(tmp_path, quantized=False, head="tied"))
    network = load_network(tied, torch.device("meta"), 0)
    table = tied.entry(tied.spec.embedding)
    parts = list(memory._tensors(network))
    assert sum(part.untyped_storage().nbytes() for part in parts) == network_bytes(network) + table.end - table.begin


def test_the_cache_is_zero_and_of_the_kernels_shape(checkpoint: Checkpoint) -> None:
    cache = DeviceKV(checkpoint.config, 5, BLOCK, torch.bfloat16, torch.device("cpu"))
    assert (cache.num_blocks, cache.block_size, cache.zero_block) == (5, BLOCK, 5)
    assert len(cache.keys) == len(cache.values) == 2
    for tensor in cache.keys + cache.values:
        assert tensor.shape == (6, 2, BLOCK, 64) and tensor.dtype == torch.bfloat16
        assert tensor.is_contiguous() and not tensor.any()
    assert len({tensor.data_ptr() for tensor in cache.keys + cache.values}) == 4
