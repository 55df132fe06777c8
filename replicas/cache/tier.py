"""HostTier: which slot of host memory holds which block's state, and which copies that takes. Bookkeeping only; knows no tensors and no tokens.

State that is evicted from the device gets a slot at once, but is copied only when its block is about to be overwritten, so that the evictions of
a long prompt are paced with its rows. State that comes back keeps its slot: evicted again, it costs no copy. Copies are carried out in the
order in which they were given out here; that they are is the business of whoever asked for them.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple


class BlockCopy(NamedTuple):
    """The state of one block goes from the device to a slot of the host, or back where `restores`."""

    block_id: int
    slot: int
    restores: bool


class HostTier:
    """Slots of one block each. With none, nothing is ever kept.

    num_saves, num_restores: copies given out. num_evictions: states that lost their slot to another.
    The queue of idle slots doubles as the eviction order: those without a key first, then the least recently used. A slot that a copy back was
    promised from (`claim`) is not idle until that is given out or cancelled.
    """

    def __init__(self, num_slots: int = 0) -> None:
        self._keys: list[bytes | None] = [None] * num_slots
        self._by_key: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_slots))
        self._saves: dict[int, int] = {}  # block -> slot, copies that are due before the block is overwritten
        self._sources: dict[int, int] = {}  # the same, slot -> block
        self._fills: dict[int, int] = {}  # block -> slot, copies that are due before the block is read
        self.num_saves = 0
        self.num_restores = 0
        self.num_evictions = 0

    @property
    def num_slots(self) -> int:
        """Slots in all."""
        return len(self._keys)

    @property
    def num_used(self) -> int:
        """Slots that hold a state, or will before its block is overwritten."""
        return len(self._by_key)

    @property
    def num_claimed(self) -> int:
        """Slots that a copy back is still to come from."""
        return len(self._keys) - len(self._idle)

    def holds(self, key: bytes) -> bool:
        """Whether the state named by `key` can come back."""
        return key in self._by_key

    def keep(self, block_id: int, key: bytes) -> None:
        """The device gives up a block that holds the state named by `key`. It is lost where every slot is claimed."""
        slot = self._by_key.get(key)
        if slot is not None:
            self._idle.move_to_end(slot)
            return
        if not self._idle:
            return
        slot, _ = self._idle.popitem(last=False)
        evicted = self._keys[slot]
        if evicted is not None:
            del self._by_key[evicted]
            self.num_evictions += 1
            if slot in self._sources:
                del self._saves[self._sources.pop(slot)]
        self._keys[slot] = key
        self._by_key[key] = slot
        self._idle[slot] = None
        self._saves[block_id] = slot
        self._sources[slot] = block_id

    def claim(self, keys: Iterable[bytes]) -> None:
        """These states, all held here and nowhere on the device, are about to come back: they keep their slots until they have."""
        for key in keys:
            del self._idle[self._by_key[key]]

    def bring(self, block_id: int, key: bytes) -> None:
        """A claimed state is to be copied to this block before it is read."""
        self._fills[block_id] = self._by_key[key]

    def cancel(self, block_id: int) -> bool:
        """Nobody will read this block: whether a copy to it was still to come, and now is not."""
        slot = self._fills.pop(block_id, None)
        if slot is None:
            return False
        self._idle[slot] = None
        return True

    def before_write(self, block_ids: Iterable[int]) -> list[BlockCopy]:
        """Gives out the copies that are due before these blocks are overwritten."""
        return [copy for block_id in block_ids for copy in self._save(block_id)]

    def before_read(self, block_id: int) -> list[BlockCopy]:
        """Gives out the copies that are due before this block is read; none when its state is there."""
        slot = self._fills.pop(block_id, None)
        if slot is None:
            return []
        self._idle[slot] = None
        self.num_restores += 1
        source = self._sources.get(slot)
        saves = self._save(block_id) + ([] if source is None else self._save(source))
        return [*saves, BlockCopy(block_id, slot, restores=True)]

    def _save(self, block_id: int) -> list[BlockCopy]:
        slot = self._saves.pop(block_id, None)
        if slot is None:
            return []
        del self._sources[slot]
        self.num_saves += 1
        return [BlockCopy(block_id, slot, restores=False)]

    def awaited(self) -> dict[int, bytes | None]:
        """The blocks that a copy is still to come to, with the keys of what it will bring."""
        return {block_id: self._keys[slot] for block_id, slot in self._fills.items()}

    def check(self) -> None:
        """States the invariants; raises AssertionError where one does not hold."""
        assert self._by_key == {key: slot for slot, key in enumerate(self._keys) if key is not None}, (
            "a key has two slots"
        )
        claimed = list(self._fills.values())
        assert len(set(claimed)) == len(claimed), "two copies are to come from one slot"
        assert set(claimed) | set(self._idle) == set(range(self.num_slots)), "a slot is neither idle nor claimed"
        assert not set(claimed) & set(self._idle), "a slot is idle and claimed"
        assert self._sources == {slot: block_id for block_id, slot in self._saves.items()}, (
            "two blocks are to be saved to one slot"
        )
        assert all(self._keys[slot] is not None for slot in (*self._sources, *claimed)), (
            "a copy is due for a slot without a key"
        )
