"""What the scheduler makes of the host tier: prefixes that were evicted come back before they are read, a bounded number of blocks a step."""

import pickle

import pytest

from espalier.replicas.request import SamplingParams
from espalier.replicas.schedule.builder import RESTORES_PER_STEP
from espalier.replicas.schedule.step import Step
from tests.support.fake_shard import FakeShard, fake_config, fake_info
from tests.support.rounds import Rounds, make_request

# 1,024 block ids, 256 copies back and as many to the host before them, with room for the frames around them.
MAX_STEP_BYTES = 40_000


def evicting(
    num_blocks: int = 8, num_host_slots: int = 32, *, tracks: int = 1, batch_tokens: int = 64
) -> tuple[Rounds, FakeShard]:
    info = fake_info(num_blocks=num_blocks, num_host_slots=num_host_slots, max_context=100_000, vocab_size=2000, eos=())
    shard = FakeShard(info)
    return Rounds(fake_config(tracks=tracks, batch_tokens=batch_tokens), shard), shard


def num_copies(step: Step, *, restores: bool) -> int:
    return sum(copy.restores == restores for copy in step.copies)


@pytest.mark.parametrize("tracks", [1, 2])
@pytest.mark.parametrize(("num_host_slots", "cached"), [(0, 0), (2, 0), (32, 96)])
def test_evicted_prefixes_come_back_as_far_as_the_host_holds_them(
    tracks: int, num_host_slots: int, cached: int
) -> None:
    rounds, _ = evicting(num_host_slots=num_host_slots, tracks=tracks)
    prompts = {name: [first, *range(100)] for first, name in enumerate("abc")}
    for name, prompt in prompts.items():
        rounds.run(make_request(name, prompt))
    for name, prompt in prompts.items():
        rounds.run(make_request(f"{name} again", prompt))
        assert rounds.sequences[f"{name} again"].cached_tokens == cached
    rounds.assert_exact()
    stats, host = rounds.stats, rounds.scheduler.pool.host
    assert stats.prefix_hits == stats.prefix_host_hits == 3 * cached
    assert host.num_restores == 3 * cached // 16 and (host.num_saves > 0) == (num_host_slots > 0)
    assert host.num_used == min(num_host_slots, host.num_saves)


def test_a_prefix_may_lie_on_both_sides() -> None:
    rounds, shard = evicting()
    prompt = list(range(100))
    rounds.run(make_request("cold", prompt))
    rounds.run(make_request("other", range(500, 560)))  # evicts the tail of the first, which goes first
    rounds.run(make_request("warm", prompt))
    assert rounds.sequences["warm"].cached_tokens == 96
    assert 0 < rounds.stats.prefix_host_hits < 96
    assert sum(num_copies(step, restores=True) for step in shard.steps) * 16 == rounds.stats.prefix_host_hits
    rounds.assert_exact()


def test_what_a_long_prompt_evicts_is_saved_as_its_rows_come() -> None:
    rounds, shard = evicting(num_blocks=64, num_host_slots=200, batch_tokens=64)
    rounds.run(make_request("cold", range(1000)))
    before = len(shard.steps)
    rounds.run(make_request("other", range(500, 1500)))
    saves = [num_copies(step, restores=False) for step in shard.steps[before:]]
    assert sum(saves) >= 60 and max(saves) <= 64 // 16 + 1
    rounds.assert_exact()


def test_what_an_aborted_prompt_would_have_overwritten_is_saved_when_it_is_wanted() -> None:
    """Its blocks were given to the prompt, which never came to write to them: what they held is on the device still, but found no more."""
    rounds, shard = evicting(num_blocks=64, num_host_slots=200)
    prompt = list(range(320))
    rounds.run(make_request("cold", prompt))
    rounds.run(make_request("newer", range(500, 1100)))
    rounds.submit(make_request("leaves", range(1200, 1600)))
    rounds.plan()
    rounds.abort("leaves")
    rounds.commit()
    rounds.run(make_request("warm", prompt))
    copies = [copy for step in shard.steps for copy in step.copies]
    late = {copy.slot for copy in copies[: [copy.restores for copy in copies].index(True)] if not copy.restores}
    assert any(copy.restores and copy.slot not in late for copy in copies), "some were saved just before they came back"
    assert rounds.sequences["warm"].cached_tokens == 304
    assert rounds.tokens["warm"] == rounds.tokens["cold"]


def test_a_long_prefix_comes_back_over_several_steps_while_others_decode() -> None:
    num_blocks = 3 * RESTORES_PER_STEP
    rounds, shard = evicting(num_blocks=num_blocks, num_host_slots=2 * num_blocks, batch_tokens=512)
    prompt = [token % 997 for token in range(num_blocks * 16 - 200)]
    rounds.run(make_request("cold", prompt))
    rounds.run(make_request("evicting", reversed(prompt)))
    rounds.submit(make_request("other", range(30), max_tokens=40))
    rounds.plan()
    other = rounds.sequences["other"].residence.seq_id
    before = len(shard.steps)
    rounds.run(make_request("warm", [*prompt, 1], params=SamplingParams(temperature=0.0, max_tokens=4)))
    assert rounds.sequences["warm"].cached_tokens == len(prompt) // 16 * 16
    rounds.assert_exact()
    steps = shard.steps[before:]
    restores = [num_copies(step, restores=True) for step in steps]
    assert max(restores) == RESTORES_PER_STEP and sum(restores) * 16 == rounds.stats.prefix_host_hits
    beside = [other in [lane.seq_id for lane in step.lanes] for step in steps]
    assert sum(count > 0 for count in restores) >= 3 and all(beside[:20])
    assert max(len(pickle.dumps(step)) for step in steps) < MAX_STEP_BYTES


def long_prefix_under_way() -> tuple[Rounds, list[int]]:
    """A sequence whose prefix is coming back, with copies that no step has been told of yet."""
    num_blocks = 3 * RESTORES_PER_STEP
    rounds, _ = evicting(num_blocks=num_blocks, num_host_slots=2 * num_blocks, batch_tokens=512)
    prompt = [token % 997 for token in range(num_blocks * 8)]
    for name in ("cold", "a", "b"):
        rounds.run(make_request(name, prompt if name == "cold" else [ord(name), *prompt]))
    rounds.submit(make_request("warm", prompt))
    rounds.plan()
    assert 0 < rounds.scheduler.pool.host.num_claimed < num_blocks
    return rounds, prompt


@pytest.mark.parametrize("num_committed", [0, 1])
def test_an_abort_on_the_way_leaves_no_slot_claimed(num_committed: int) -> None:
    rounds, prompt = long_prefix_under_way()
    for _ in range(num_committed):
        rounds.commit()
    rounds.abort("warm")
    assert rounds.scheduler.pool.host.num_claimed == 0
    rounds.finish()
    rounds.run(make_request("again", prompt))
    assert rounds.sequences["again"].cached_tokens == len(prompt) - 16
    assert rounds.tokens["again"] == rounds.tokens["cold"]


def test_a_second_sequence_shares_what_is_still_coming_back() -> None:
    rounds, prompt = long_prefix_under_way()
    rounds.submit(make_request("second", prompt, priority=1))
    rounds.plan()
    rounds.abort("warm")
    rounds.finish()
    assert rounds.sequences["second"].cached_tokens == len(prompt) - 16
    assert rounds.tokens["second"] == rounds.tokens["cold"]


def test_a_step_whose_rows_fail_has_made_its_copies() -> None:
    rounds, shard = evicting()
    prompt = list(range(100))
    rounds.run(make_request("cold", prompt))
    rounds.run(make_request("other", range(500, 620)))

    def fail(step: Step) -> None:
        raise RuntimeError("broken")

    shard.on_step = fail
    rounds.run(make_request("fails", prompt))
    assert "fails" in rounds.failures
    shard.on_step = lambda step: None
    rounds.run(make_request("warm", prompt))
    assert rounds.sequences["warm"].cached_tokens == 96
    assert rounds.tokens["warm"] == rounds.tokens["cold"]


def test_a_preempted_sequence_gets_its_state_back() -> None:
    rounds, _ = evicting(num_blocks=6)
    for number in range(3):
        rounds.submit(make_request(str(number), [number, 7, 8], max_tokens=70))
    rounds.finish()
    assert rounds.stats.preemptions > 0 and rounds.scheduler.pool.host.num_restores > 0
    rounds.assert_exact()


def test_without_prefix_cache_nothing_goes_to_the_host() -> None:
    shard = FakeShard(fake_info(num_blocks=8, num_host_slots=32))
    rounds = Rounds(fake_config(prefix_cache=False), shard)
    for number in range(3):
        rounds.run(make_request(str(number), range(100)))
    assert not any(step.copies for step in shard.steps) and rounds.scheduler.pool.host.num_used == 0
