"""Whatever arrives, leaves and fails, in whatever order rounds come back: tokens equal the solo run, everything ends, nothing leaks."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from espalier.replicas.request import SamplingParams
from espalier.replicas.schedule.step import Lane, Step
from espalier.replicas.sequence import Status
from tests.support.fake_shard import FakeShard, fake_config, fake_info, solo_tokens
from tests.support.rounds import Rounds, make_request

arrival = st.tuples(
    st.just("submit"),
    st.integers(0, 2),  # prompt family: sequences of one family share prefixes
    st.integers(1, 40),  # prompt length
    st.integers(1, 50),  # max_tokens
    st.integers(-1, 1),  # priority
    st.booleans(),  # needs history
)
operation = st.one_of(
    arrival,
    st.tuples(st.sampled_from(["plan", "commit", "rounds", "rounds", "abort"]), st.integers(0, 30)),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    operations=st.lists(operation, min_size=5, max_size=60),
    num_blocks=st.integers(6, 12),
    num_host_slots=st.sampled_from([0, 1, 4, 30]),
    max_lanes=st.integers(1, 5),
    spare_rows=st.integers(0, 40),
    depth=st.sampled_from([1, 2]),
    tracks=st.sampled_from([1, 2]),
    round_ms=st.sampled_from([(), ((16, 1.0), (32, 2.0), (64, 9.0))]),
    prefix_cache=st.booleans(),
    failing=st.sets(st.integers(0, 12), max_size=2),
)
def test_any_history_is_exact(
    operations: list[tuple[object, ...]],
    num_blocks: int,
    num_host_slots: int,
    max_lanes: int,
    spare_rows: int,
    depth: int,
    tracks: int,
    round_ms: tuple[tuple[int, float], ...],
    prefix_cache: bool,
    failing: set[int],
) -> None:
    def fault(step: Step, lane: Lane) -> str | None:
        return "broken" if lane.seq_id in failing and lane.start > 20 else None

    info = fake_info(num_blocks=num_blocks, vocab_size=211, round_ms=round_ms, num_host_slots=num_host_slots)
    shard = FakeShard(info, max_lanes=max_lanes, fault=fault)
    config = fake_config(
        max_lanes=max_lanes,
        batch_tokens=max_lanes + spare_rows,
        max_steps_in_flight=depth,
        tracks=tracks,
        decode_gap_ms=1.5,
        prefix_cache=prefix_cache,
    )
    rounds = Rounds(config, shard)
    aborted: set[str] = set()
    for name, *numbers in operations:
        match name, numbers:
            case "submit", [int(family), int(length), int(max_tokens), int(priority), bool(history)]:
                request_id = str(len(rounds.sequences))
                prompt = [(family * 20 + position // 3) % 61 for position in range(length)]
                params = SamplingParams(
                    temperature=0.0, max_tokens=max_tokens, seed=family, presence_penalty=0.5 if history else 0.0
                )
                rounds.submit(make_request(request_id, prompt, priority=priority, params=params))
            case "plan", _:
                rounds.plan()
            case "commit", [int(number)]:
                rounds.commit(overtaking=number % 2 == 1)
            case "rounds", [int(count)]:
                for number in range(count):
                    while rounds.plan():
                        pass
                    rounds.commit(overtaking=number % 3 == 1)
            case "abort", [int(index)] if rounds.sequences:
                request_id = str(index % len(rounds.sequences))
                if rounds.sequences[request_id].status is not Status.ENDED:
                    aborted.add(request_id)
                    rounds.abort(request_id)
    rounds.finish(max_rounds=5000)
    for request_id, sequence in rounds.sequences.items():
        tokens = tuple(rounds.tokens[request_id])
        whole = solo_tokens(sequence.request, shard.info)
        if request_id in aborted or request_id in rounds.failures:
            whole = whole[: len(tokens)]
        assert tokens == whole, request_id


@pytest.mark.parametrize("seed", range(12))
def test_a_crowd_in_a_tiny_pool_is_exact(seed: int) -> None:
    draw = random.Random(seed)
    shard = FakeShard(fake_info(num_blocks=8, vocab_size=211, num_host_slots=seed % 3 * 7), max_lanes=5)
    rounds = Rounds(fake_config(max_lanes=5, batch_tokens=24, tracks=1 + seed % 2), shard)
    for number in range(14):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=draw.randint(20, 90),
            ignore_eos=True,
            presence_penalty=draw.choice([0.0, 0.5]),
        )
        prompt = [number % 3, *range(draw.randint(1, 30))]
        rounds.submit(make_request(str(number), prompt, params=params, priority=draw.randint(0, 2)))
        for _ in range(draw.randint(0, 12)):
            draw.choice([rounds.plan, rounds.plan, rounds.commit])()
    rounds.finish(max_rounds=5000, overtaking=seed % 4 == 1)
    rounds.assert_exact()
    assert rounds.stats.preemptions >= 3
    host = rounds.scheduler.pool.host
    assert (host.num_restores > 0) == (host.num_slots > 0)
