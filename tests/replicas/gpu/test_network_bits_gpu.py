"""Rounds of wide networks on the GPU, bit for bit: a row's logits and its cache are those that it has alone, whatever else is in the round.

Tokens hide a wrong bit more often than not; logits do not. Wide layers run every form of the linear with real numbers of programs, and
many rounds in many compositions find what happens once in some thousand launches.
"""

import random
from typing import TYPE_CHECKING

import pytest
import torch

from espalier.deploy.random_model.shapes import SHAPES
from espalier.replicas.gpu.rounds import RoundShapes

if TYPE_CHECKING:  # it needs Triton
    from tests.support.random_network import NetworkRuns, Rows

pytestmark = pytest.mark.gpu

CONTEXT = 4096  # so long that decode rows beside prompts share programs
SLOTS = 64
PROMPTS = 8  # of the slots
PROMPT_LEN = 300
LAYERS = 3
SHAPES_OF_ROUNDS = RoundShapes(
    decode_rows=(1, 16, 64), mixed_rows=(64, 256, 1024, 2048), mixed_lanes=(8, SLOTS), contexts=(CONTEXT,)
)


@pytest.fixture(scope="module", params=["qwen3-8b", "qwen3-27b"])
def runs(request: pytest.FixtureRequest) -> "NetworkRuns":
    from tests.support.random_network import NetworkRuns, model_config, random_network

    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    config = model_config(SHAPES[request.param], LAYERS)
    found = NetworkRuns(random_network(config, 4.0, 6.0, CONTEXT, device), SHAPES_OF_ROUNDS, SLOTS, device)
    found.prepare(graphs=True)
    return found


def decode_row(slot: int) -> "Rows":
    from tests.support.random_network import Rows

    return Rows(slot, 400 + 9 * slot, (7 * slot + 1,))


def test_decode_rows_in_company(runs: "NetworkRuns") -> None:
    rows = [decode_row(slot) for slot in range(SLOTS)]
    alone = torch.stack([runs.run([row])[0].clone() for row in rows])
    caches = [runs.cache_of(row.slot, row.start + 1) for row in rows]
    draw = random.Random(1)
    for count in (64, 64, 33, 16, 5) * 40:
        slots = draw.sample(range(SLOTS), count)
        assert torch.equal(runs.run([rows[slot] for slot in slots]), alone[slots]), f"a round of {count} rows"
    for row, cache in zip(rows, caches, strict=True):
        assert torch.equal(runs.cache_of(row.slot, row.start + 1), cache), f"the cache of slot {row.slot}"


def test_prompts_however_they_are_cut(runs: "NetworkRuns") -> None:
    from tests.support.random_network import Rows

    draw = random.Random(2)
    prompts = [tuple(draw.randrange(100_000) for _ in range(PROMPT_LEN)) for _ in range(PROMPTS)]
    others = {slot: decode_row(slot) for slot in range(PROMPTS, SLOTS)}
    alone = {slot: runs.run([row])[0].clone() for slot, row in others.items()}
    whole = []
    for slot, prompt in enumerate(prompts):
        logits = runs.run([Rows(slot, 0, prompt)], greedy=False)[0].clone()
        whole.append((logits, runs.cache_of(slot, PROMPT_LEN)))
    for position, token in enumerate(prompts[0]):
        last = runs.run([Rows(0, position, (token,))])
    assert torch.equal(last[0], whole[0][0]) and torch.equal(runs.cache_of(0, PROMPT_LEN), whole[0][1])
    for _ in range(60):
        done = [0] * PROMPTS
        while min(done) < PROMPT_LEN:
            lanes = _cut(draw, prompts, done)
            lanes += [others[slot] for slot in draw.sample(sorted(others), draw.randrange(20))]
            draw.shuffle(lanes)
            logits = runs.run(lanes, greedy=False)
            for lane, got in zip(lanes, logits, strict=True):
                if lane.slot in others:
                    assert torch.equal(got, alone[lane.slot]), (
                        f"a row beside {sum(len(x.tokens) for x in lanes)} others"
                    )
                elif lane.start + len(lane.tokens) == PROMPT_LEN:
                    assert torch.equal(got, whole[lane.slot][0]), f"the end of prompt {lane.slot}"
        for slot in range(PROMPTS):
            assert torch.equal(runs.cache_of(slot, PROMPT_LEN), whole[slot][1]), f"the cache of prompt {slot}"


def _cut(draw: random.Random, prompts: list[tuple[int, ...]], done: list[int]) -> "list[Rows]":
    """The next pieces of some prompts, within the rows that a round has room for."""
    from tests.support.random_network import Rows

    room = draw.choice((40, 64, 200, 256, 700, 1024, 2000))
    sizes = draw.choice(((1, 2, 5, 16, 17, 33, 64, 100), (PROMPT_LEN,)))
    lanes = []
    for slot in draw.sample(range(PROMPTS), PROMPTS):
        count = min(PROMPT_LEN - done[slot], room, draw.choice(sizes))
        if count:
            lanes.append(Rows(slot, done[slot], prompts[slot][done[slot] : done[slot] + count]))
            done[slot] += count
            room -= count
    return lanes
