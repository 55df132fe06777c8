"""Shard through its Steps: tokens by reference, penalties, ends, failures that stay with their sequence, and the options it refuses."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from espalier.replicas import shard as shard_module
from espalier.replicas.config import EngineConfig
from espalier.replicas.errors import CheckpointError, InvalidRequestError
from espalier.replicas.model.decoder import Decoder
from espalier.replicas.request import SamplingParams
from espalier.replicas.schedule.step import (
    BlockAppend,
    Lane,
    Observed,
    SequenceBegin,
    Step,
    StepCommit,
    StepResult,
    TokenRef,
)
from espalier.replicas.shard import Shard
from tests.support.model_runs import StepDriver
from tests.support.tiny import make_tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
PROMPT = tuple(range(40, 73))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("shard")
    make_tiny_checkpoint(folder / "model")
    return EngineConfig(model_path=folder / "model", cache_dir=folder / "cache", kv_tokens=2048, cpu_threads=1)


@pytest.fixture
def shard(config: EngineConfig) -> Shard:
    return Shard(config)


def begin(seq_id: int, params: SamplingParams = GREEDY, prompt_len: int = len(PROMPT), blocks: int = 8) -> Step:
    """A step without rows that makes a sequence known, with blocks of its own."""
    return Step(
        1000 + seq_id,
        "t",
        (),
        begins=(SequenceBegin(seq_id, params, prompt_len),),
        appends=(BlockAppend(seq_id, tuple(range(seq_id * blocks, (seq_id + 1) * blocks))),),
    )


def only(result: StepResult, seq_id: int = 0) -> int:
    assert not result.failed
    (token,) = result.sampled[seq_id]
    return token.token_id


def test_info(shard: Shard) -> None:
    info = shard.info
    assert (info.num_blocks, info.block_size, info.max_context, info.vocab_size) == (128, 16, 2048, 512)
    assert info.eos_token_ids == (0, 2)
    assert info.quantization == "exl3 4bpw"
    assert info.numerics_id.startswith("cpu1-fp32-")


def test_equal_weights_have_equal_ids(config: EngineConfig, shard: Shard, tmp_path: Path) -> None:
    other = Shard(replace(config, model_path=make_tiny_checkpoint(tmp_path / "same"), cache_dir=tmp_path / "cache"))
    assert (other.info.weights_id, other.info.numerics_id) == (shard.info.weights_id, shard.info.numerics_id)
    another = Shard(
        replace(config, model_path=make_tiny_checkpoint(tmp_path / "other", seed=1), cache_dir=tmp_path / "cache")
    )
    assert another.info.weights_id != shard.info.weights_id
    narrow = Shard(replace(config, kv_dtype="fp16"))
    assert narrow.info.numerics_id != shard.info.numerics_id


def test_tokens_by_reference_equal_tokens_by_value(shard: Shard) -> None:
    by_value = StepDriver(shard).generate(PROMPT, GREEDY, 6)
    shard.execute(begin(0))
    tokens = [only(shard.execute(Step(1, "t", (Lane(0, 0, PROMPT, 1),))))]
    row = len(PROMPT) - 1
    for step_id in range(2, 7):
        lane = Lane(0, len(PROMPT) + step_id - 2, (TokenRef(step_id - 1, row),), 1)
        tokens.append(only(shard.execute(Step(step_id, "t", (lane,)))))
        row = 0
    assert tokens == by_value


def test_rows_are_numbered_through_the_lanes(shard: Shard) -> None:
    for seq_id in (0, 1):
        shard.execute(begin(seq_id))
    first = shard.execute(Step(1, "t", (Lane(0, 0, PROMPT, 1), Lane(1, 0, PROMPT[:20], 1))))
    refs = (TokenRef(1, len(PROMPT) - 1), TokenRef(1, len(PROMPT) + 19))
    second = shard.execute(Step(2, "t", (Lane(0, len(PROMPT), refs[:1], 1), Lane(1, 20, refs[1:], 1))))
    for seq_id, length in ((0, len(PROMPT)), (1, 20)):
        alone = StepDriver(shard).generate(PROMPT[:length], GREEDY, 2, seq_id=9)
        assert [only(replace(first, sampled={0: first.sampled[seq_id]})), second.sampled[seq_id][0].token_id] == alone


def test_rows_that_are_not_sampled_give_no_tokens(shard: Shard) -> None:
    shard.execute(begin(0))
    result = shard.execute(Step(1, "t", (Lane(0, 0, PROMPT[:10], 0),)))
    assert result == StepResult(1, {}, {})


def test_several_sampled_rows_give_what_single_rows_give(shard: Shard) -> None:
    params = replace(GREEDY, temperature=1.0, seed=5, repetition_penalty=1.3, presence_penalty=0.5)
    tokens = StepDriver(shard).generate(PROMPT, params, 5)
    shard.execute(begin(0, params))
    shard.execute(Step(1, "t", (Lane(0, 0, PROMPT, 1),)))
    result = shard.execute(Step(2, "t", (Lane(0, len(PROMPT), tuple(tokens[:4]), 4),)))
    assert [token.token_id for token in result.sampled[0]] == tokens[1:]


def test_rows_that_are_not_kept_leave_no_trace(shard: Shard) -> None:
    params = replace(GREEDY, temperature=1.0, seed=5, repetition_penalty=1.3, frequency_penalty=1.0)
    tokens = StepDriver(shard).generate(PROMPT, params, 6)
    shard.execute(begin(0, params))
    shard.execute(Step(1, "t", (Lane(0, 0, PROMPT, 1),)))
    shard.commit(StepCommit(1, ((0, len(PROMPT)),)))
    drafts = (*tokens[:2], 7, 7, 7)
    shard.execute(Step(2, "t", (Lane(0, len(PROMPT), drafts, 5),)))
    shard.commit(StepCommit(2, ((0, 2),)))
    result = shard.execute(Step(3, "t", (Lane(0, len(PROMPT) + 2, tuple(tokens[2:5]), 3),)))
    assert [token.token_id for token in result.sampled[0]] == tokens[3:6]


def test_restored_tokens_count_for_penalties(shard: Shard) -> None:
    params = replace(GREEDY, repetition_penalty=1.5)
    tokens = StepDriver(shard).generate(PROMPT, params, 3, seq_id=0)
    # The first two blocks still hold the prompt's keys: another sequence reads them instead of computing them.
    step = Step(
        50,
        "t",
        (Lane(1, 32, PROMPT[32:], 1),),
        begins=(SequenceBegin(1, params, len(PROMPT)),),
        appends=(BlockAppend(1, (0, 1, 100)),),
        observed=(Observed(1, 0, PROMPT[:32]),),
    )
    assert only(shard.execute(step), 1) == tokens[0]


def test_min_tokens_bans_the_end_tokens(shard: Shard) -> None:
    always_eos = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=4, logit_bias=((2, 100.0),))
    tokens = StepDriver(shard).generate(PROMPT, always_eos, 5)
    assert 2 not in tokens[:3]
    assert tokens[3] == 2


# --- failures -------------------------------------------------------------------------------------------------------


def test_a_failing_row_fails_alone(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected in the forward of any round that holds the token 499: the other lanes' tokens are those of a round without it."""
    expected = StepDriver(shard).generate(PROMPT, GREEDY, 2, seq_id=5)
    whole = Decoder.forward

    def broken(self: Decoder, batch, cache):  # type: ignore[no-untyped-def]
        if (batch.token_ids == 499).any():
            raise RuntimeError("injected")
        return whole(self, batch, cache)

    monkeypatch.setattr(Decoder, "forward", broken)
    for seq_id in (0, 1):
        shard.execute(begin(seq_id))
    result = shard.execute(Step(1, "t", (Lane(1, 0, (499, 3), 1), Lane(0, 0, PROMPT, 1))))
    assert result.failed == {1: "RuntimeError: injected"}
    assert result.sampled[0][0].token_id == expected[0]
    # What was planned for the failed sequence meanwhile fails with the same message; the other goes on.
    lanes = (Lane(0, len(PROMPT), (TokenRef(1, 2 + len(PROMPT) - 1),), 1), Lane(1, 2, (TokenRef(1, 1),), 1))
    result = shard.execute(Step(2, "t", lanes))
    assert result.failed == {1: "RuntimeError: injected"}
    assert result.sampled[0][0].token_id == expected[1]
    shard.execute(Step(3, "t", (), ends=(0, 1)))


def test_a_failing_sample_fails_alone(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = StepDriver(shard).generate(PROMPT, GREEDY, 1, seq_id=5)
    draw = shard_module.sample_row

    def broken(logits, row):  # type: ignore[no-untyped-def]
        if row.params.seed == 13:
            raise RuntimeError("injected")
        return draw(logits, row)

    monkeypatch.setattr(shard_module, "sample_row", broken)
    shard.execute(begin(0))
    shard.execute(begin(1, replace(GREEDY, seed=13)))
    result = shard.execute(Step(1, "t", (Lane(1, 0, PROMPT, 1), Lane(0, 0, PROMPT, 1))))
    assert result.failed == {1: "RuntimeError: injected"}
    assert result.sampled[0][0].token_id == expected[0]


def test_what_no_row_can_use_fails_its_sequence(shard: Shard) -> None:
    for seq_id in range(3):
        shard.execute(begin(seq_id, replace(GREEDY, logit_bias=((600, 1.0),)) if seq_id == 2 else GREEDY))
    lanes = (Lane(0, 0, (512,), 1), Lane(1, 0, (TokenRef(77, 0),), 1), Lane(2, 0, PROMPT, 1))
    failed = shard.execute(Step(1, "t", lanes)).failed
    assert "512" in failed[0]
    assert "step 77" in failed[1]
    assert "600" in failed[2]


def test_a_failed_sequences_leftovers_do_not_reach_others(shard: Shard) -> None:
    """Its blocks may hold NaN; whoever gets them next must not see it."""
    expected = StepDriver(shard).generate(PROMPT, GREEDY, 3, seq_id=5)
    for cached in (*shard._cache.keys, *shard._cache.values):
        cached[:-1] = torch.nan
    assert StepDriver(shard).generate(PROMPT, GREEDY, 3, seq_id=6) == expected


# --- options and files ----------------------------------------------------------------------------------------------


def test_options_that_cannot_be_met_are_named(config: EngineConfig) -> None:
    for changes, param in (
        ({"device": "cuda"}, "device"),
        ({"max_context": 5000}, "max_context"),
        ({"max_context": 3000}, "max_context"),
        ({"kv_tokens": 2**40}, "kv_tokens"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            Shard(replace(config, **changes))
        assert caught.value.param == param


def test_a_flipped_weight_byte_is_refused_until_accepted(config: EngineConfig, tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "model")
    config = replace(config, model_path=folder, cache_dir=tmp_path / "cache")
    Shard(config)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="first load") as caught:
        Shard(config)
    (record,) = (tmp_path / "cache" / "records").glob("weights-*.json")
    assert str(record) in caught.value.message
    assert str(file) in caught.value.message
    record.unlink()
    Shard(config)
