"""BlockPool: who holds what, what can still be found, and what goes first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.replicas.cache.blocks import BlockPool
from espalier.replicas.cache.table import BlockTable, blocks_for


def test_allocate_takes_and_free_gives_back() -> None:
    pool = BlockPool(4)
    block_ids = pool.allocate(3)
    assert len(set(block_ids)) == 3 and pool.num_free == 1
    pool.free(block_ids)
    assert pool.num_free == 4
    pool.check()


def test_a_shared_block_is_free_when_its_last_holder_is_gone() -> None:
    pool = BlockPool(2)
    block_ids = pool.allocate(1)
    pool.share(block_ids)
    pool.free(block_ids)
    assert pool.num_free == 1
    pool.free(block_ids)
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(block_ids)


def test_a_free_block_is_found_until_its_storage_is_needed() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1)
    pool.publish(block_id, b"key")
    pool.free([block_id])
    assert pool.find(b"key") == block_id and pool.num_idle([block_id]) == 1
    pool.share([block_id])
    assert pool.num_free == 1 and pool.num_idle([block_id]) == 0
    pool.free([block_id])
    pool.allocate(2)
    assert pool.find(b"key") is None
    pool.check()


def test_unnamed_blocks_go_first_then_the_least_recently_used_and_the_tail_of_a_table_before_its_head() -> None:
    pool = BlockPool(5)
    old, new = pool.allocate(2), pool.allocate(2)
    unnamed = pool.allocate(1)
    for index, block_id in enumerate([*old, *new]):
        pool.publish(block_id, bytes([index]))
    pool.free(old)
    pool.free(new)
    pool.free(unnamed)
    assert pool.allocate(5) == [*unnamed, old[1], old[0], new[1], new[0]]


def test_the_first_block_of_a_key_stays_the_one_that_is_found() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"key")
    pool.publish(second, b"key")
    assert pool.find(b"key") == first
    pool.free([second])
    pool.check()
    assert pool.allocate(1) == [second], "a block that cannot be found is the first to go"
    assert pool.find(b"key") == first


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "free", "publish"]), st.integers(0, 7)), max_size=60))
def test_invariants_hold_through_any_use(operations: list[tuple[str, int]]) -> None:
    pool = BlockPool(8)
    held: list[list[int]] = []
    published: set[int] = set()
    for name, number in operations:
        if name == "allocate":
            held.append(pool.allocate(min(number, pool.num_free)))
            published -= set(held[-1])
        elif name == "share" and held:
            held.append(list(held[number % len(held)]))
            pool.share(held[-1])
        elif name == "free" and held:
            pool.free(held.pop(number % len(held)))
        elif name == "publish" and held:
            for block_id in set(held[number % len(held)]) - published:
                pool.publish(block_id, bytes([number]))
                if pool.find(bytes([number])) == block_id:
                    published.add(block_id)
        pool.check()
        assert pool.num_free == 8 - len({block_id for block_ids in held for block_id in block_ids})


def test_a_table_places_positions() -> None:
    table = BlockTable(16)
    table.append([5, 2])
    assert table.num_positions == 32
    assert [table.slot(position) for position in (0, 15, 16, 31)] == [80, 95, 32, 47]
    assert [blocks_for(count, 16) for count in (0, 1, 16, 17)] == [0, 1, 1, 2]
