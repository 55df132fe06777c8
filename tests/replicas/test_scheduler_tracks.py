"""Scheduler with a track for prompts and one for decoding: who runs where, and that nothing a step of either reads is given away."""

import pytest

from espalier.replicas.config import resolved
from espalier.replicas.request import SamplingParams
from espalier.replicas.schedule.step import Lane, Step, TokenRef
from espalier.replicas.schedule.tracks import DECODE, MAIN, PROMPT, make_tracks
from espalier.replicas.sequence import Status
from tests.support.fake_shard import FakeShard, fake_config, fake_info
from tests.support.rounds import Rounds, make_request

LONG = SamplingParams(temperature=0.0, max_tokens=50, presence_penalty=0.5, seed=3)


def two_tracks(*, num_blocks: int = 64, max_lanes: int = 4, batch_tokens: int = 32, **shard: object) -> Rounds:
    config = fake_config(max_lanes=max_lanes, batch_tokens=batch_tokens, tracks=2)
    return Rounds(config, FakeShard(fake_info(num_blocks=num_blocks, eos=()), max_lanes=max_lanes, **shard))  # type: ignore[arg-type]


def seq_ids(step: Step | None) -> list[int]:
    assert step is not None
    return [lane.seq_id for lane in step.lanes]


def test_one_track_does_everything_two_share_it() -> None:
    (main,) = make_tracks(resolved(fake_config(max_lanes=4, batch_tokens=32)))
    assert (main.name, main.max_rows, main.takes_prompts, main.takes_decodes) == (MAIN, 32, True, True)
    decode, prompt = make_tracks(resolved(fake_config(max_lanes=4, batch_tokens=32, tracks=2)))
    assert (decode.name, decode.max_rows, decode.takes_prompts, decode.takes_decodes) == (DECODE, 4, False, True)
    assert (prompt.name, prompt.max_rows, prompt.takes_prompts, prompt.takes_decodes) == (PROMPT, 32, True, False)


def test_prompts_run_on_theirs_and_every_other_row_decodes() -> None:
    rounds = two_tracks(num_blocks=24, max_lanes=6)
    rounds.run(*(make_request(str(i), range(i, i + 10 + 20 * (i % 2)), max_tokens=30) for i in range(8)))
    rounds.assert_exact()
    for step in rounds.shard.steps:
        for lane in step.lanes:
            length = 10 + 20 * (lane.seq_id % 2)
            assert step.track == (PROMPT if lane.start < length else DECODE)
            assert step.track == PROMPT or (len(lane.tokens), lane.num_sampled) == (1, 1)


def test_a_sequence_decodes_once_its_last_prompt_step_has_come_back() -> None:
    rounds = two_tracks()
    rounds.submit(make_request("a", range(40), max_tokens=5))
    first, last = rounds.plan(), rounds.plan()
    assert (first and first.track, last and last.track, rounds.plan()) == (PROMPT, PROMPT, None)
    rounds.commit()
    assert rounds.plan() is None, "a step that reads it is still in flight"
    rounds.commit()
    decoding = rounds.plan()
    assert decoding is not None and decoding.track == DECODE
    assert decoding.lanes[0].tokens == (rounds.tokens["a"][0],), "the token is known by then"
    ahead = rounds.plan()
    assert ahead is not None and ahead.lanes[0].tokens == (TokenRef(decoding.step_id, 0),)
    rounds.finish()
    rounds.assert_exact()


def test_decoding_goes_on_while_prompts_are_in_flight() -> None:
    rounds = two_tracks(max_lanes=3)
    rounds.submit(make_request("a", range(5), max_tokens=30))
    rounds.plan()
    rounds.commit()
    rounds.submit(make_request("long", range(100, 300)))
    for _ in range(10):
        while rounds.plan():
            pass
        assert rounds.num_in_flight == {DECODE: 2, PROMPT: 2}
        rounds.commit(overtaking=rounds.flying[0][0].name == PROMPT)
    assert len(rounds.tokens["a"]) == 11 and rounds.sequences["long"].num_computed == 0
    rounds.finish(overtaking=True)
    rounds.assert_exact()


@pytest.mark.parametrize("overtaking", [False, True])
def test_a_preempted_sequence_begins_on_the_prompt_track_again(overtaking: bool) -> None:
    rounds = two_tracks(num_blocks=8)
    for index in range(4):
        rounds.submit(make_request(str(index), range(index, index + 10), params=LONG))
    rounds.finish(overtaking=overtaking)
    assert rounds.stats.preemptions >= 2
    rounds.assert_exact()
    begun = [(step.track, begin.seq_id) for step in rounds.shard.steps for begin in step.begins]
    assert len(begun) == 4 + rounds.stats.preemptions and {track for track, _ in begun} == {PROMPT}


def test_a_decoding_sequence_takes_blocks_only_when_the_prompts_step_that_reads_them_is_done() -> None:
    rounds = two_tracks(num_blocks=6, max_lanes=2)
    rounds.submit(make_request("old", range(30), max_tokens=60))
    rounds.plan()
    rounds.commit()
    rounds.submit(make_request("new", range(100, 140), max_tokens=2))
    new = rounds.sequences["new"]
    while new.status is not Status.PREEMPTED:
        if not rounds.plan():
            # The prompt's steps stay in flight, whatever comes of the other track.
            assert rounds.commit(overtaking=rounds.flying[0][0].name == PROMPT)
    held = new.residence.table.block_ids
    assert rounds.num_in_flight[PROMPT] > 0 and rounds.scheduler.pool.num_idle(held) == 0
    rounds.finish()
    rounds.assert_exact()


def test_an_aborted_prompt_keeps_its_blocks_until_its_own_track_is_done() -> None:
    rounds = two_tracks(num_blocks=8, max_lanes=2)
    rounds.submit(make_request("a", range(20), max_tokens=40))
    rounds.plan()
    rounds.commit()
    rounds.submit(make_request("b", range(100, 164), max_tokens=2))
    while rounds.plan():
        pass
    assert rounds.num_in_flight == {DECODE: 2, PROMPT: 2}
    rounds.abort("b")
    rounds.submit(make_request("c", range(200, 264), max_tokens=2))
    for _ in range(6):
        rounds.commit(overtaking=rounds.flying[0][0].name == PROMPT)
        while step := rounds.plan():
            assert step.track == DECODE, "the lane and the blocks of b are still read"
    rounds.finish()
    rounds.assert_exact("a", "c")


def test_a_step_that_fails_as_a_whole_takes_nothing_of_the_other_track_with_it() -> None:
    def breaks(step: Step) -> None:
        if step.track == PROMPT and any(lane.start == 64 for lane in step.lanes):
            raise RuntimeError("lost")

    rounds = two_tracks(on_step=breaks)
    rounds.submit(make_request("a", range(10), max_tokens=30))
    rounds.plan()
    rounds.commit()
    rounds.submit(make_request("b", range(100, 180)))
    rounds.finish(overtaking=True)
    assert rounds.failures == {"b": "lost"}
    rounds.assert_exact("a")


def test_a_failed_lane_of_the_decode_track_ends_its_sequence_alone() -> None:
    def fault(step: Step, lane: Lane) -> str | None:
        return "broken" if step.track == DECODE and lane.seq_id == 1 else None

    rounds = two_tracks(fault=fault)
    rounds.run(*(make_request(str(index), range(index, index + 20)) for index in range(3)))
    assert rounds.failures == {"1": "broken"} and len(rounds.tokens["1"]) == 1
    rounds.assert_exact("0", "2")
