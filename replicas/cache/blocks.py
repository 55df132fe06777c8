"""Which KV block is whose: allocate, share, free, evict. Bookkeeping only; knows no tensors, no sequences and no tokens."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from espalier.replicas.cache.tier import HostTier


@dataclass(slots=True)
class Block:
    """One block of KV storage.

    ref_count: sequences whose table holds it. key: names the tokens whose state it holds, when it is full and findable.
    """

    block_id: int
    ref_count: int = 0
    key: bytes | None = None


class BlockPool:
    """All blocks of a shard. A block that nobody holds stays findable by its key until its storage is needed for something else.

    The free queue doubles as the eviction order: blocks without a key first, then the least recently used.
    host: the tier behind the device, which what is evicted goes to and comes back from.
    """

    def __init__(self, num_blocks: int, host: HostTier | None = None) -> None:
        self.host = HostTier() if host is None else host
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._by_key: dict[bytes, int] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, findable ones included."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks for one holder, `count <= num_free`. What could be found there no longer is; the host may keep it."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            block = self._blocks[block_id]
            block.ref_count = 1
            if block.key is not None:
                self.host.keep(block_id, block.key)
                self._forget(block)
        return block_ids

    def take(self, keys: Sequence[bytes]) -> list[int]:
        """Blocks for one more holder of the states that these keys name, all of which must be kept: shared ones, and new ones for what the host
        alone holds, which is copied there before it is read (`host.before_read`)."""
        found = [self._by_key.get(key) for key in keys]
        self.share([block_id for block_id in found if block_id is not None])
        absent = [key for key, block_id in zip(keys, found, strict=True) if block_id is None]
        self.host.claim(absent)
        fresh = self.allocate(len(absent))
        for block_id, key in zip(fresh, absent, strict=True):
            self.host.bring(block_id, key)
            self._name(block_id, key)
        return [self._by_key[key] for key in keys]

    def share(self, block_ids: Sequence[int]) -> None:
        """One more holder for each of these, held or free."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.ref_count == 0:
                del self._free[block_id]
            block.ref_count += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """One holder less for each of these, given in the order of a table: of one table, the later blocks are evicted earlier."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} freed twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                if self.host.cancel(block_id):
                    self._forget(block)
                self._free[block_id] = None
                if block.key is None:
                    self._free.move_to_end(block_id, last=False)

    def publish(self, block_id: int, key: bytes) -> None:
        """Makes a full block findable. Where another block has that key already, that one stays the one to be found."""
        block = self._blocks[block_id]
        assert block.ref_count > 0 and block.key is None, f"block {block_id} is not a new block of a live sequence"
        if key not in self._by_key:
            self._name(block_id, key)

    def _name(self, block_id: int, key: bytes) -> None:
        self._by_key[key] = block_id
        self._blocks[block_id].key = key

    def _forget(self, block: Block) -> None:
        assert block.key is not None, f"{block} has no key"
        del self._by_key[block.key]
        block.key = None

    def find(self, key: bytes) -> int | None:
        """The block that holds the state named by `key`, or will before it is read."""
        return self._by_key.get(key)

    def keeps(self, key: bytes) -> bool:
        """Whether the state named by `key` is on the device or on the host."""
        return key in self._by_key or self.host.holds(key)

    def num_idle(self, block_ids: Sequence[int]) -> int:
        """How many of these are free now: `share` would take so many from the free ones."""
        return sum(self._blocks[block_id].ref_count == 0 for block_id in block_ids)

    def check(self) -> None:
        """States the invariants; raises AssertionError where one does not hold."""
        for block in self._blocks:
            assert block.ref_count >= 0, f"{block}: negative count"
            assert (block.ref_count == 0) == (block.block_id in self._free), f"{block}: held and free, or neither"
            assert block.key is None or self._by_key.get(block.key) == block.block_id, f"{block}: its key finds another"
        for key, block_id in self._by_key.items():
            assert self._blocks[block_id].key == key, f"block {block_id} is found by a key that it does not have"
        self.host.check()
        for block_id, awaited in self.host.awaited().items():
            block = self._blocks[block_id]
            assert block.ref_count > 0 and block.key == awaited, f"{block}: what is to be copied there is not its own"
