"""The host tier's bookkeeping: which state has a slot, which copies are due when, and that nothing is lost, doubled or leaked on the way."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.replicas.cache.blocks import BlockPool
from espalier.replicas.cache.tier import BlockCopy, HostTier


def save(block_id: int, slot: int) -> BlockCopy:
    return BlockCopy(block_id, slot, restores=False)


def restore(block_id: int, slot: int) -> BlockCopy:
    return BlockCopy(block_id, slot, restores=True)


def kept(pool: BlockPool, *keys: bytes) -> list[int]:
    """Blocks that hold these states, and are nobody's any more."""
    block_ids = pool.allocate(len(keys))
    for block_id, key in zip(block_ids, keys, strict=True):
        pool.publish(block_id, key)
    pool.free(block_ids)
    return block_ids


def test_what_is_evicted_is_saved_before_it_is_overwritten_and_comes_back() -> None:
    pool = BlockPool(2, HostTier(3))
    first, second = kept(pool, b"a", b"b")
    held = pool.allocate(2)
    assert pool.find(b"a") is None and pool.keeps(b"a") and pool.host.num_used == 2
    assert pool.host.before_write([second]) == [save(second, 0)], "the later block of a table goes first"
    assert pool.host.before_write([second, first]) == [save(first, 1)], "nothing is saved twice"
    pool.free(held)
    back = pool.take([b"a", b"b"])
    assert pool.find(b"a") == back[0] and pool.num_free == 0 and pool.host.num_claimed == 2
    assert pool.host.before_read(back[0]) == [restore(back[0], 1)] and pool.host.before_read(back[0]) == []
    pool.check()
    assert (pool.host.num_saves, pool.host.num_restores, pool.host.num_evictions) == (2, 1, 0)


def test_state_that_came_back_is_evicted_again_without_a_copy() -> None:
    pool = BlockPool(1, HostTier(1))
    kept(pool, b"a")
    copies = []
    for _ in range(3):
        held = pool.allocate(1)
        copies += pool.host.before_write(held)
        pool.free(held)
        held = pool.take([b"a"])
        copies += pool.host.before_read(held[0])
        pool.free(held)
    assert copies == [save(0, 0), restore(0, 0), restore(0, 0), restore(0, 0)]


def test_what_is_wanted_before_it_was_saved_is_saved_first() -> None:
    """The block that still holds it is another sequence's by now, but not overwritten."""
    pool = BlockPool(2, HostTier(2))
    (block_id,) = kept(pool, b"a")
    pool.allocate(1)
    assert pool.allocate(1) == [block_id]
    pool.free([1 - block_id])
    (back,) = pool.take([b"a"])
    assert pool.host.before_read(back) == [save(block_id, 0), restore(back, 0)]
    assert pool.host.before_write([block_id]) == []


def test_the_block_that_state_comes_back_to_is_saved_first() -> None:
    pool = BlockPool(1, HostTier(2))
    kept(pool, b"a")
    pool.free(pool.allocate(1))
    (block_id,) = pool.allocate(1)
    assert pool.host.before_write([block_id]) == [save(0, 0)]
    pool.publish(block_id, b"b")
    pool.free([block_id])
    pool.take([b"a"])
    assert pool.host.before_read(0) == [save(0, 1), restore(0, 0)]


def test_the_least_recently_used_slot_is_given_up() -> None:
    pool = BlockPool(1, HostTier(2))
    for key in (b"a", b"b"):
        kept(pool, key)
        pool.host.before_write([0])
    held = pool.take([b"a"])  # evicts b, which gets the other slot, and then a is the one used last
    pool.host.before_read(0)
    pool.free(held)
    kept(pool, b"c")
    pool.free(pool.allocate(1))
    assert [pool.keeps(key) for key in (b"a", b"b", b"c")] == [True, False, True]
    assert pool.host.num_evictions == 1
    pool.check()


def test_a_slot_that_state_is_to_come_from_is_not_given_up() -> None:
    pool = BlockPool(2, HostTier(1))
    kept(pool, b"a")
    pool.allocate(2)
    pool.host.before_write([0, 1])
    pool.free([0])
    kept(pool, b"b")
    assert pool.take([b"a"]) == [0] and not pool.keeps(b"b"), "its only slot is taken: b is lost"
    assert pool.host.before_read(0) == [restore(0, 0)] and pool.host.num_evictions == 0


def test_what_nobody_will_read_is_not_copied_back() -> None:
    pool = BlockPool(2, HostTier(2))
    kept(pool, b"a")
    pool.free(pool.allocate(2))
    held = pool.take([b"a"])
    pool.share(held)
    pool.free(held)
    assert pool.host.num_claimed == 1, "another sequence still wants it"
    pool.free(held)
    assert pool.host.num_claimed == 0 and pool.find(b"a") is None and pool.keeps(b"a")
    assert pool.host.before_read(held[0]) == []
    pool.check()


def test_without_slots_nothing_is_kept() -> None:
    pool = BlockPool(1)
    kept(pool, b"a")
    pool.allocate(1)
    assert not pool.keeps(b"a") and pool.host.before_write([0]) == []
    pool.check()


@dataclass
class Machine:
    """A pool, and what its copies and its holders' rows do to memory. A block's or slot's content is the key of the state that it holds."""

    num_blocks: int
    num_slots: int
    pool: BlockPool = field(init=False)
    device: list[bytes] = field(init=False)
    host: list[bytes] = field(init=False)
    held: "list[Holder]" = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks, HostTier(self.num_slots))
        self.device = [b""] * self.num_blocks
        self.host = [b""] * self.num_slots

    def make(self, copies: list[BlockCopy]) -> None:
        for copy in copies:
            if copy.restores:
                self.device[copy.block_id] = self.host[copy.slot]
            else:
                self.host[copy.slot] = self.device[copy.block_id]

    def admit(self, family: int, num_wanted: int, num_blocks: int) -> None:
        keys = [b"%d:%d" % (family, index) for index in range(max(num_wanted, num_blocks))]
        num_found = 0
        while num_found < num_wanted and self.pool.keeps(keys[num_found]):
            num_found += 1
        shared = [block_id for key in keys[:num_found] if (block_id := self.pool.find(key)) is not None]
        num_new = max(num_blocks, num_found) - len(shared)
        if num_new + self.pool.num_idle(shared) > self.pool.num_free:
            return
        block_ids = self.pool.take(keys[:num_found])
        block_ids += self.pool.allocate(max(num_blocks, num_found) - num_found)
        self.held.append(Holder(keys, block_ids, num_found))

    def run(self, holder: "Holder", count: int) -> None:
        """The holder's next blocks are read, where they were found, or written and made findable."""
        for index in range(holder.num_run, min(holder.num_run + count, len(holder.block_ids))):
            block_id, key = holder.block_ids[index], holder.keys[index]
            if index < holder.num_found:
                self.make(self.pool.host.before_read(block_id))
                assert self.device[block_id] == key
            else:
                self.make(self.pool.host.before_write([block_id]))
                self.device[block_id] = key
                self.pool.publish(block_id, key)
            holder.num_run = index + 1

    def check(self) -> None:
        self.pool.check()
        tier = self.pool.host
        for index in range(12):
            for family in range(3):
                key = b"%d:%d" % (family, index)
                block_id = self.pool.find(key)
                assert block_id is None or block_id in tier.awaited() or self.device[block_id] == key
        for slot, saved in enumerate(tier._keys):
            source = tier._sources.get(slot)
            assert saved is None or (self.host[slot] if source is None else self.device[source]) == saved
        assert tier.num_claimed <= sum(len(holder.block_ids) for holder in self.held)


@dataclass
class Holder:
    keys: list[bytes]
    block_ids: list[int]
    num_found: int
    num_run: int = 0


@settings(max_examples=200, deadline=None)
@given(
    num_blocks=st.integers(1, 10),
    num_slots=st.integers(0, 12),
    operations=st.lists(
        st.one_of(
            st.tuples(st.just("admit"), st.integers(0, 2), st.integers(0, 6), st.integers(1, 6)),
            st.tuples(st.just("run"), st.integers(0, 9), st.integers(1, 4), st.just(0)),
            st.tuples(st.just("free"), st.integers(0, 9), st.just(0), st.just(0)),
        ),
        max_size=80,
    ),
)
def test_every_state_is_where_its_key_finds_it(
    num_blocks: int, num_slots: int, operations: list[tuple[str, int, int, int]]
) -> None:
    machine = Machine(num_blocks, num_slots)
    for name, first, second, third in operations:
        if name == "admit":
            machine.admit(first, second, third)
        elif machine.held and name == "run":
            machine.run(machine.held[first % len(machine.held)], second)
        elif machine.held:
            machine.pool.free(machine.held.pop(first % len(machine.held)).block_ids)
        machine.check()
    for holder in machine.held:
        machine.pool.free(holder.block_ids)
    machine.held.clear()
    machine.check()
    assert machine.pool.num_free == num_blocks and machine.pool.host.num_claimed == 0


@pytest.mark.parametrize("num_slots", [0, 12])
def test_a_working_set_beyond_the_device_is_found_again_only_with_a_host_tier(num_slots: int) -> None:
    machine = Machine(4, num_slots)
    found = []
    for family in (0, 1, 2) * 4:
        machine.admit(family, 2, 4)
        (holder,) = machine.held
        machine.run(holder, 4)
        found.append(holder.num_found)
        machine.pool.free(holder.block_ids)
        machine.held.clear()
        machine.check()
    assert found == [0] * 3 + [2 * bool(num_slots)] * 9
