"""Which state a new sequence need not compute. A match is a position: the state after `token_ids[:position]` can be restored.

Each kind of state (KV blocks here; recurrent snapshots are another) says which positions it can restore; the longest common one is used.
Keys are a hash chain over full blocks of tokens, so equal keys mean equal tokens from the first one on, under equal weights and numerics.
"""

import hashlib
from array import array
from collections.abc import Collection, Iterable
from typing import Protocol, TypeVar

from espalier.replicas.cache.blocks import BlockPool

Handle = TypeVar("Handle")


def root_key(weights_id: str, numerics_id: str, block_size: int) -> bytes:
    """The key before the first block: state is worth nothing under other weights or another arithmetic."""
    return hashlib.blake2b(f"{weights_id}\0{numerics_id}\0{block_size}".encode(), digest_size=32).digest()


class PrefixChain:
    """The tokens of one sequence, and the key of each of its full blocks, computed when first asked for."""

    def __init__(self, root: bytes, block_size: int, token_ids: Iterable[int]) -> None:
        self.block_size = block_size
        self.token_ids = array("I", token_ids)
        self._keys = [root]

    def key(self, index: int) -> bytes:
        """The key of block `index`, which must be full: that of the block before it hashed with its own tokens."""
        while len(self._keys) <= index + 1:
            start = (len(self._keys) - 1) * self.block_size
            tokens = self.token_ids[start : start + self.block_size]
            assert len(tokens) == self.block_size, f"block {len(self._keys) - 1} is not full"
            self._keys.append(hashlib.blake2b(self._keys[-1] + tokens.tobytes(), digest_size=32).digest())
        return self._keys[index + 1]


class StateKind(Protocol[Handle]):
    """One kind of state that can be kept and restored."""

    @property
    def name(self) -> str:
        """What SequenceBegin.restore calls it."""
        ...

    def positions(self, chain: PrefixChain, limit: int) -> Collection[int]:
        """Every position in 1 .. limit whose state is kept for these tokens. Position 0 needs no state."""
        ...

    def hold(self, chain: PrefixChain, position: int) -> Handle:
        """Keeps the state at a position of `positions` from being evicted, until it is released."""
        ...

    def release(self, handle: Handle) -> None:
        """Ends a hold."""
        ...


class KVPrefix:
    """The StateKind of paged keys and values: any border of full blocks, as far as all blocks before it are found."""

    name = "kv"

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def positions(self, chain: PrefixChain, limit: int) -> Collection[int]:
        """Multiples of the block size up to the longest match, on the device or on the host."""
        size = chain.block_size
        found = 0
        while (found + 1) * size <= limit and self._pool.keeps(chain.key(found)):
            found += 1
        return range(size, found * size + 1, size)

    def blocks(self, chain: PrefixChain, position: int) -> list[int]:
        """Those of the blocks before a position of `positions` that are on the device, in order."""
        block_ids = [self._pool.find(key) for key in self._keys(chain, position)]
        return [block_id for block_id in block_ids if block_id is not None]

    def hold(self, chain: PrefixChain, position: int) -> list[int]:
        """The blocks before a position, in order: shares those on the device, and takes new ones for what the host holds."""
        return self._pool.take(self._keys(chain, position))

    def _keys(self, chain: PrefixChain, position: int) -> list[bytes]:
        return [chain.key(index) for index in range(position // chain.block_size)]

    def release(self, handle: list[int]) -> None:
        """Frees them again."""
        self._pool.free(handle)


def longest_common(restorable: Iterable[Collection[int]]) -> int:
    """The largest position that every kind can restore; 0 when they share none."""
    return max(set.intersection(*map(set, restorable)), default=0)
