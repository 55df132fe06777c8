"""Prefix reuse: a match is a position that every kind of state can restore."""

from collections.abc import Collection

import pytest

from espalier.replicas.cache.blocks import BlockPool
from espalier.replicas.cache.prefix import KVPrefix, PrefixChain, longest_common, root_key
from tests.support.fake_shard import FakeShard, fake_config, fake_info
from tests.support.rounds import Rounds, make_request

ROOT = root_key("weights", "numerics", 16)


class SnapshotKind:
    """A kind that keeps its state at a few positions only, as a recurrent model would: of the tokens `kept`, at `kept_at`."""

    name = "snapshots"

    def __init__(self, kept: tuple[int, ...], kept_at: set[int]) -> None:
        self.kept = kept
        self.kept_at = kept_at
        self.holds: list[int] = []
        self.num_releases = 0

    def positions(self, chain: PrefixChain, limit: int) -> Collection[int]:
        return {p for p in self.kept_at if p <= limit and tuple(chain.token_ids[:p]) == self.kept[:p]}

    def hold(self, chain: PrefixChain, position: int) -> int:
        self.holds.append(position)
        return 1000 + position

    def release(self, handle: int) -> None:
        assert handle == 1000 + self.holds[self.num_releases]
        self.num_releases += 1


def published(pool: BlockPool, tokens: range) -> PrefixChain:
    chain = PrefixChain(ROOT, 16, tokens)
    block_ids = pool.allocate(len(tokens) // 16)
    for index, block_id in enumerate(block_ids):
        pool.publish(block_id, chain.key(index))
    pool.free(block_ids)
    return chain


def test_a_key_names_all_tokens_before_it_and_the_arithmetic() -> None:
    chain = PrefixChain(ROOT, 16, range(32))
    changed_head = PrefixChain(ROOT, 16, [99, *range(1, 32)])
    assert chain.key(1) == PrefixChain(ROOT, 16, range(64)).key(1)
    assert chain.key(1) != changed_head.key(1)
    assert chain.key(0) != PrefixChain(root_key("weights", "other", 16), 16, range(32)).key(0)
    assert chain.key(0) != PrefixChain(root_key("other", "numerics", 16), 16, range(32)).key(0)
    with pytest.raises(AssertionError, match="not full"):
        chain.key(2)


def test_kv_restores_any_border_of_blocks_up_to_the_match() -> None:
    pool = BlockPool(8)
    published(pool, range(64))
    kv = KVPrefix(pool)
    same = PrefixChain(ROOT, 16, range(80))
    forked = PrefixChain(ROOT, 16, [*range(40), *range(100, 140)])
    assert list(kv.positions(same, 79)) == [16, 32, 48, 64]
    assert list(kv.positions(same, 63)) == [16, 32, 48]
    assert list(kv.positions(forked, 79)) == [16, 32]
    assert list(kv.positions(PrefixChain(ROOT, 16, range(5, 50)), 44)) == []


def test_held_blocks_are_not_evicted() -> None:
    pool = BlockPool(4)
    published(pool, range(64))
    kv = KVPrefix(pool)
    chain = PrefixChain(ROOT, 16, range(64))
    held = kv.hold(chain, 32)
    pool.allocate(2)
    assert list(kv.positions(chain, 64)) == [16, 32]
    kv.release(held)
    pool.allocate(2)
    assert list(kv.positions(chain, 64)) == []


@pytest.mark.parametrize(
    ("restorable", "position"),
    [
        ([range(16, 65, 16)], 64),
        ([range(16, 65, 16), {32, 40}], 32),
        ([range(16, 65, 16), {40}], 0),
        ([range(16, 65, 16), {16, 64}, {16, 48}], 16),
        ([range(16, 1, 16)], 0),
    ],
)
def test_the_longest_common_position_wins(restorable: list[Collection[int]], position: int) -> None:
    assert longest_common(restorable) == position


def test_a_second_kind_with_sparse_positions_bounds_what_is_restored() -> None:
    prompt = tuple(range(100, 180))
    shard = FakeShard(fake_info())
    kind = SnapshotKind(prompt, kept_at={7, 48, 70})
    rounds = Rounds(fake_config(), shard, other_kinds=[kind])
    rounds.run(make_request("cold", prompt))
    assert rounds.sequences["cold"].cached_tokens == 0 and kind.holds == []
    rounds.run(make_request("warm", prompt))
    assert rounds.sequences["warm"].cached_tokens == 48
    assert [begin.restore for step in shard.steps for begin in step.begins] == [(), (("snapshots", 1048),)]
    assert kind.holds == [48] and kind.num_releases == 1
    rounds.assert_exact()


@pytest.mark.parametrize("tail", [0, 1, 15, 16, 17])
def test_the_last_prompt_token_is_always_run(tail: int) -> None:
    prompt = range(1, 65 + tail)
    rounds = Rounds(fake_config(), FakeShard(fake_info()))
    rounds.run(make_request("cold", prompt))
    rounds.run(make_request("warm", prompt))
    assert rounds.sequences["warm"].cached_tokens == (len(prompt) - 1) // 16 * 16
    rounds.assert_exact()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_reply_is_reused_by_the_next_turn(depth: int) -> None:
    prompt = list(range(1, 21))
    rounds = Rounds(fake_config(max_steps_in_flight=depth), FakeShard(fake_info(eos=())))
    rounds.run(make_request("first", prompt, max_tokens=45))
    turn = [*prompt, *rounds.tokens["first"]]
    # 65 tokens; the last one was sampled, never computed.
    rounds.run(make_request("second", [*turn, 3, 4, 5]))
    assert rounds.sequences["second"].cached_tokens == 64
    rounds.run(make_request("third", turn[:64]))
    assert rounds.sequences["third"].cached_tokens == 48
    rounds.assert_exact()


def test_the_last_sampled_token_is_not_taken_for_computed() -> None:
    prompt = list(range(1, 21))
    rounds = Rounds(fake_config(), FakeShard(fake_info(eos=())))
    rounds.run(make_request("first", prompt, max_tokens=44))
    rounds.run(make_request("second", [*prompt, *rounds.tokens["first"], 3, 4, 5]))
    assert rounds.sequences["second"].cached_tokens == 48, "64 tokens are known, but only 63 were computed"
    rounds.assert_exact()


def test_without_prefix_cache_nothing_is_found() -> None:
    rounds = Rounds(fake_config(prefix_cache=False), FakeShard(fake_info()))
    rounds.run(make_request("cold", range(64)))
    rounds.run(make_request("again", range(64)))
    assert rounds.sequences["again"].cached_tokens == 0
    assert rounds.stats.prefix_queries == rounds.stats.prefix_hits == 0
    rounds.assert_exact()
