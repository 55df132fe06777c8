"""Hash chains and the bounded memory of who was sent which."""

import subprocess
import sys

from espalier.cluster.prefix_index import PrefixIndex, hash_chain


def test_a_chain_has_one_hash_a_full_block_and_depends_on_all_before_it() -> None:
    ids = list(range(50))
    chain = hash_chain(ids, 16)
    assert len(chain) == 3
    assert hash_chain(ids[:48], 16) == chain
    changed = hash_chain([7, *ids[1:]], 16)
    assert all(a != b for a, b in zip(chain, changed, strict=True))
    assert hash_chain([*ids[:16], 99, *ids[17:]], 16)[0] == chain[0]


def test_chains_are_equal_in_every_process() -> None:
    code = "from espalier.cluster.prefix_index import hash_chain; print(*hash_chain(range(64), 16))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert tuple(map(int, out.split())) == hash_chain(range(64), 16)


def test_held_blocks_counts_the_leading_ones() -> None:
    index = PrefixIndex(entries=100)
    index.record("a", [1, 2, 3])
    assert index.held_blocks("a", [1, 2, 3, 4]) == 3
    assert index.held_blocks("a", [1, 9, 3]) == 1
    assert index.held_blocks("a", [2, 3]) == 2
    assert index.held_blocks("b", [1]) == 0
    index.forget("a")
    assert index.held_blocks("a", [1]) == 0


def test_the_longest_unused_chain_goes_first_and_tails_before_heads() -> None:
    index = PrefixIndex(entries=4)
    index.record("a", [1, 2])
    index.record("a", [3, 4])
    index.record("a", [1, 2])
    index.record("a", [5])
    assert index.held_blocks("a", [1, 2]) == 2
    assert index.held_blocks("a", [3, 4]) == 1
    index.record("a", [6])
    assert index.held_blocks("a", [3, 4]) == 0
