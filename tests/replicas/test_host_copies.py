"""The host tier's copies on a CPU: every bit arrives, in any order of slots, over parts and batches of any size."""

import random

import pytest
import torch
from torch import Tensor

from espalier.replicas.cache import host_copies
from espalier.replicas.cache.host_copies import HostCopies, blocks_view
from espalier.replicas.cache.tier import BlockCopy

LAYERS, BLOCKS, HEADS, SIZE, DIM = 3, 9, 2, 16, 8
BLOCK_BYTES = 2 * LAYERS * HEADS * SIZE * DIM * 2


def any_bits(dtype: torch.dtype = torch.float16) -> Tensor:
    """Keys and values of any bits, NaNs of every kind among them."""
    shape = (2, LAYERS, BLOCKS, HEADS, SIZE, DIM * dtype.itemsize // 2)
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(dtype)


def bits(kv: Tensor, block_id: int) -> Tensor:
    return kv[:, :, block_id].contiguous().view(torch.int16).clone()


def save(block_id: int, slot: int) -> BlockCopy:
    return BlockCopy(block_id, slot, restores=False)


def restore(block_id: int, slot: int) -> BlockCopy:
    return BlockCopy(block_id, slot, restores=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("part_blocks", "staged"), [(100, 100), (2, 3), (1, 1)])
def test_every_bit_comes_back(
    dtype: torch.dtype, part_blocks: int, staged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = any_bits(dtype)
    block_bytes = kv[:, :, 0].numel() * dtype.itemsize
    monkeypatch.setattr(host_copies, "_PART_BYTES", part_blocks * block_bytes)
    monkeypatch.setattr(host_copies, "_STAGING_BYTES", staged * block_bytes)
    copies = HostCopies(blocks_view(kv), 7, idle_block=BLOCKS - 1)
    before = [bits(kv, block_id) for block_id in range(BLOCKS)]
    slots = [4, 5, 6, 0, 2, 1, 3]
    copies.run([save(block_id, slot) for block_id, slot in enumerate(slots)])
    kv[:, :, :8] = 0
    targets = random.Random(1).sample(range(8), 7)
    copies.run([restore(block_id, slot) for block_id, slot in zip(targets, slots, strict=True)])
    for source, target in enumerate(targets):
        assert torch.equal(bits(kv, target), before[source])
    assert torch.equal(bits(kv, 8), before[8])
    (untouched,) = set(range(8)) - set(targets)
    assert not bits(kv, untouched).any()


def test_copies_take_effect_in_their_order() -> None:
    kv = any_bits()
    copies = HostCopies(blocks_view(kv), 2, idle_block=BLOCKS - 1)
    before = [bits(kv, block_id) for block_id in range(BLOCKS)]
    # Slot 0 is read between two writes to it, and block 3 is saved and then overwritten.
    copies.run(
        [save(0, 0), save(3, 1), restore(3, 0), save(1, 0), restore(4, 0), restore(5, 1), save(2, 0), save(6, 0)]
    )
    copies.run([restore(7, 0)])
    assert [torch.equal(bits(kv, target), before[source]) for target, source in ((3, 0), (4, 1), (5, 3), (7, 6))] == [
        True
    ] * 4


def test_what_failed_to_be_copied_is_never_read() -> None:
    kv = any_bits()
    copies = HostCopies(blocks_view(kv), 2, idle_block=BLOCKS - 1)
    with pytest.raises(IndexError):
        copies.run([save(BLOCKS, 0)])
    with pytest.raises(RuntimeError, match="an earlier copy of blocks failed: index out of range"):
        copies.run([restore(1, 0)])
    with pytest.raises(RuntimeError, match="an earlier copy"):
        copies.run([])


def test_the_staging_memory_is_what_the_plan_counts() -> None:
    copies = HostCopies(blocks_view(any_bits()), 2, idle_block=BLOCKS - 1)
    assert host_copies.staging_bytes(BLOCK_BYTES, 2) == copies._staging.numel() * 8 == 2 * BLOCK_BYTES
    assert host_copies.staging_bytes(100 << 20, 5) == 100 << 20, "a block at least"
    assert host_copies.staging_bytes(1 << 20, 500) == 64 << 20
    assert host_copies.staging_bytes(BLOCK_BYTES, 0) == 0
