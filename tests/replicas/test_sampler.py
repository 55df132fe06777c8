"""Sampler: every parameter does what it says, rows do not see each other, and draws follow the distribution."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from espalier.replicas.errors import InvalidRequestError, RequestFailedError
from espalier.replicas.request import SamplingParams
from espalier.replicas.sampling.sampler import SampleRow, TokenHistory, sample, sample_row
from espalier.replicas.sampling.seeds import choice_seed, mix64, row_key

INF = float("inf")


def random_logits(rows: int, vocab: int, *, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def draws(logits: Tensor, params: SamplingParams, count: int) -> Tensor:
    """How often each token is drawn in `count` draws at different positions."""
    ids = [sample_row(logits, SampleRow(params, position)).token_id for position in range(count)]
    return torch.bincount(torch.tensor(ids), minlength=logits.shape[0])


def history_of(prompt: list[int], output: list[int], vocab: int) -> TokenHistory:
    history = TokenHistory(vocab)
    history.observe(0, [*prompt, *output], len(prompt))
    return history


# Greedy and order


def test_temperature_zero_is_the_best_logit_and_the_lower_id_of_equals() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0])
    assert sample_row(logits, SampleRow(SamplingParams(temperature=0.0, seed=5), 9)).token_id == 1


def test_greedy_takes_penalties_bias_and_bans_into_account() -> None:
    logits = torch.tensor([1.0, 3.0, 2.5, 2.0])
    greedy = SamplingParams(temperature=0.0)
    assert sample_row(logits, SampleRow(replace(greedy, logit_bias=((3, 1.5),)), 0)).token_id == 3
    assert sample_row(logits, SampleRow(greedy, 0, banned=(1,))).token_id == 2
    row = SampleRow(replace(greedy, repetition_penalty=2.0), 2, history_of([1], [2], 4))
    assert sample_row(logits, row).token_id == 3


def test_banned_ids_beyond_the_vocabulary_are_no_matter() -> None:
    assert (
        sample_row(torch.tensor([1.0, 0.0]), SampleRow(SamplingParams(temperature=0.0), 0, banned=(0, 99))).token_id
        == 1
    )


def test_a_bias_on_a_token_the_model_lacks_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        sample_row(torch.zeros(4), SampleRow(SamplingParams(logit_bias=((4, 1.0),)), 0))
    assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_finite_maximum_fail_their_row(bad: float, temperature: float) -> None:
    logits = torch.full((4,), -INF)
    logits[2] = bad
    with pytest.raises(RequestFailedError):
        sample_row(logits, SampleRow(SamplingParams(temperature=temperature), 0))


def test_logits_are_left_as_they_were() -> None:
    logits = random_logits(1, 50)
    before = logits.clone()
    params = SamplingParams(
        repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=1.0, logit_bias=((3, 2.0),), top_k=5, logprobs=3
    )
    sample(logits, [SampleRow(params, 3, history_of([1, 2], [3], 50), banned=(4,))])
    assert torch.equal(logits, before)


# Filters


def allowed(logits: Tensor, params: SamplingParams) -> set[int]:
    return {int(i) for i in draws(logits, params, 100).nonzero()[:, 0]}


def test_top_k_top_p_min_p_limit_what_is_drawn() -> None:
    logits = torch.tensor([0.0, math.log(4), math.log(2), math.log(3)])  # weights 1, 4, 2, 3 of 10
    params = SamplingParams()
    assert allowed(logits, params) == {0, 1, 2, 3}
    assert allowed(logits, replace(params, top_k=2)) == {1, 3}
    assert allowed(logits, replace(params, top_k=1)) == {1}
    assert allowed(logits, replace(params, top_k=99)) == {0, 1, 2, 3}
    assert allowed(logits, replace(params, top_p=0.3)) == {1}
    assert allowed(logits, replace(params, top_p=0.69)) == {1, 3}
    assert allowed(logits, replace(params, top_p=0.71)) == {1, 2, 3}
    assert allowed(logits, replace(params, top_p=1e-9)) == {1}
    assert allowed(logits, replace(params, min_p=0.51)) == {1, 3}
    assert allowed(logits, replace(params, min_p=1.0)) == {1}
    # top_p is of what top_k kept: 4 of 7 is over 0.57.
    assert allowed(logits, replace(params, top_k=2, top_p=0.57)) == {1}
    assert allowed(logits, replace(params, top_k=2, top_p=0.58)) == {1, 3}


def test_filters_come_after_the_temperature() -> None:
    logits = torch.tensor([0.0, 1.0])
    assert allowed(logits, SamplingParams(top_p=0.8)) == {0, 1}
    assert allowed(logits, SamplingParams(top_p=0.8, temperature=0.5)) == {1}


def test_ties_at_a_border_go_to_the_lower_id() -> None:
    logits = torch.zeros(10)
    assert allowed(logits, SamplingParams(top_k=3)) == {0, 1, 2}
    assert allowed(logits, SamplingParams(top_p=0.25)) == {0, 1, 2}
    assert allowed(logits, SamplingParams(min_p=1.0)) == set(range(10))


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-5])
def test_a_tiny_temperature_is_greedy_in_effect(temperature: float) -> None:
    assert allowed(random_logits(1, 100)[0], SamplingParams(temperature=temperature)) == {
        int(random_logits(1, 100)[0].argmax())
    }


# Penalties


def test_penalties_have_their_usual_meaning() -> None:
    logits = torch.tensor([2.0, -2.0, 2.0, -2.0, 1.0])
    params = SamplingParams(temperature=0.0, logprobs=5)
    history = history_of([0, 1, 1], [1, 2, 2, 2], 5)

    def top(**kwargs: float) -> dict[int, float]:
        row = SampleRow(replace(params, **kwargs), 7, history)  # type: ignore[arg-type]
        logprobs = sample_row(logits, row).logprobs
        assert logprobs is not None
        return dict(logprobs.top)

    def softmax(scores: list[float]) -> dict[int, float]:
        return dict(enumerate(torch.tensor(scores, dtype=torch.float64).log_softmax(0).tolist()))

    assert top(repetition_penalty=2.0) == pytest.approx(softmax([1.0, -4.0, 1.0, -2.0, 1.0]), abs=1e-6)
    assert top(presence_penalty=0.5) == pytest.approx(softmax([2.0, -2.5, 1.5, -2.0, 1.0]), abs=1e-6)
    assert top(frequency_penalty=0.5) == pytest.approx(softmax([2.0, -2.5, 0.5, -2.0, 1.0]), abs=1e-6)
    assert top(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5) == pytest.approx(
        softmax([1.0, -5.5, -1.5, -2.0, 1.0]), abs=1e-6
    )


@settings(deadline=None)
@given(data=st.data())
def test_history_does_not_depend_on_how_it_came(data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, 9), max_size=30))
    prompt_len = data.draw(st.integers(0, 30))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5)))
    whole, parts = TokenHistory(10), TokenHistory(10)
    whole.observe(0, tokens, prompt_len)
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        parts.observe(start, tokens[start:end], prompt_len)
    assert parts.length == whole.length == len(tokens)
    assert torch.equal(parts.in_prompt, whole.in_prompt)
    assert torch.equal(parts.output_counts, whole.output_counts)
    assert whole.in_prompt.nonzero()[:, 0].tolist() == sorted(set(tokens[:prompt_len]))
    assert whole.output_counts.tolist() == [tokens[prompt_len:].count(i) for i in range(10)]


def test_history_notices_a_gap() -> None:
    with pytest.raises(AssertionError):
        TokenHistory(4).observe(1, [2], 1)


# Rows and keys


def test_a_rows_token_does_not_depend_on_its_neighbours() -> None:
    vocab = 997
    logits = random_logits(24, vocab)
    settings = [
        SamplingParams(seed=3),
        SamplingParams(temperature=0.0, logprobs=4),
        SamplingParams(temperature=0.7, top_k=40, top_p=0.9, seed=7),
        SamplingParams(temperature=1.3, min_p=0.02, seed=2**64 - 1, logprobs=20),
        SamplingParams(top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.3, seed=11),
    ]
    rows = [
        SampleRow(settings[i % len(settings)], 40 + i, history_of(list(range(20)), [5] * (20 + i), vocab))
        for i in range(len(logits))
    ]
    together = sample(logits, rows)
    assert [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)] == together
    assert sample(logits.flip(0), rows[::-1])[::-1] == together
    padded = torch.cat([random_logits(5, vocab, seed=1), logits])
    assert sample(padded, rows[:5] + rows)[5:] == together


def test_seed_and_position_both_count() -> None:
    logits = torch.zeros(5000)
    by_seed = {sample_row(logits, SampleRow(SamplingParams(seed=seed), 0)).token_id for seed in range(50)}
    by_position = {sample_row(logits, SampleRow(SamplingParams(), position)).token_id for position in range(50)}
    assert len(by_seed) > 45
    assert len(by_position) > 45


def test_keys_and_choice_seeds_are_all_different() -> None:
    seeds = [0, 1, 2, 2**32, 2**63, 2**64 - 1]
    keys = {row_key(seed, position) for seed in seeds for position in range(500)}
    choices = {choice_seed(seed, index) for seed in seeds for index in range(500)}
    assert len(keys) == len(choices) == 3000
    assert not keys & choices
    assert all(choice_seed(seed, 0) == seed for seed in seeds)


def test_mix64_is_splitmix64() -> None:
    # The first outputs of the published generator from state 0.
    gamma = 0x9E3779B97F4A7C15
    assert [mix64(i * gamma % 2**64) for i in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


# Distribution


def chi_square(counts: Tensor, probabilities: Tensor) -> tuple[float, float]:
    """(the statistic, a bound that it exceeds by chance once in about a million); rare tokens are put together."""
    expected = probabilities.double() * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare].double(), counts[rare].double().sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = len(expected) - 1
    # Wilson and Hilferty 1931.
    bound = degrees * (1 - 2 / (9 * degrees) + 4.75 * math.sqrt(2 / (9 * degrees))) ** 3
    return float(((observed - expected) ** 2 / expected).sum()), bound


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_draws_follow_the_distribution(temperature: float) -> None:
    logits = random_logits(1, 40, spread=1.5)[0]
    counts = draws(logits, SamplingParams(temperature=temperature, seed=42), 1500)
    statistic, bound = chi_square(counts, (logits.double() / temperature).softmax(0))
    assert statistic < bound


def test_draws_follow_the_distribution_of_what_is_kept() -> None:
    logits = random_logits(1, 60, spread=1.5)[0]
    counts = draws(logits, SamplingParams(top_k=12, top_p=0.8, seed=1), 1500)
    kept = counts > 0
    assert 1 < kept.sum() <= 12
    statistic, bound = chi_square(counts[kept], logits[kept].double().softmax(0))
    assert statistic < bound


def test_draws_follow_the_distribution_over_seeds() -> None:
    logits = random_logits(1, 40, spread=1.5)[0]
    ids = [sample_row(logits, SampleRow(SamplingParams(seed=seed), 7)).token_id for seed in range(1500)]
    statistic, bound = chi_square(torch.bincount(torch.tensor(ids), minlength=40), logits.double().softmax(0))
    assert statistic < bound


# Logprobs


def test_logprobs_are_of_the_scores_at_temperature_one() -> None:
    logits = random_logits(1, 3000)
    params = SamplingParams(temperature=0.3, top_k=2, logprobs=20, logit_bias=((7, 3.0),))
    [token] = sample(logits, [SampleRow(params, 0)])
    scores = logits[0].double()
    scores[7] += 3.0
    expected = scores.log_softmax(0)
    assert token.logprobs is not None
    assert token.logprobs.token_id == token.token_id
    assert token.logprobs.logprob == pytest.approx(float(expected[token.token_id]), abs=1e-5)
    assert [i for i, _ in token.logprobs.top] == expected.topk(20).indices.tolist()
    assert [p for _, p in token.logprobs.top] == pytest.approx(expected.topk(20).values.tolist(), abs=1e-5)


def test_logprobs_are_in_order_with_ties_by_lower_id() -> None:
    [token] = sample(
        torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]]), [SampleRow(SamplingParams(temperature=0.0, logprobs=4), 0)]
    )
    assert token.logprobs is not None
    assert [i for i, _ in token.logprobs.top] == [1, 2, 4, 0]


def test_logprobs_of_none_and_zero() -> None:
    logits = random_logits(1, 10)
    [none] = sample(logits, [SampleRow(SamplingParams(temperature=0.0), 0)])
    [zero] = sample(logits, [SampleRow(SamplingParams(temperature=0.0, logprobs=0), 0)])
    assert none.logprobs is None
    assert zero.logprobs is not None
    assert zero.logprobs.top == ()


def test_tokens_that_cannot_be_drawn_are_not_reported() -> None:
    row = SampleRow(SamplingParams(logprobs=4), 0, banned=(0, 2))
    [token] = sample(torch.zeros(1, 4), [row])
    assert token.logprobs is not None
    assert [i for i, _ in token.logprobs.top] == [1, 3]
    assert [p for _, p in token.logprobs.top] == pytest.approx([-math.log(2)] * 2)
