"""Sampling arithmetic: exact against definitions written out in Python integers, and the noise's bits and distribution."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from espalier.kernels.elementary import exp_f32
from espalier.kernels.sampling import reference

WORD = 2**32 - 1


def random_scores(vocab: int, *, seed: int = 0, steps: float | None = None) -> Tensor:
    """Normal scores; steps: rounded to multiples of it, so that there are ties."""
    scores = torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3
    return scores if steps is None else (scores / steps).round() * steps


def in_order(values: Tensor) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-float(values[i]), i))


def keep_by_definition(scaled: Tensor, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The definition of `keep`, in Python integers."""
    ids = in_order(scaled)
    weight = {i: round(Fraction(float(exp_f32(scaled[i : i + 1]))) * 2**40) for i in ids}
    if top_k:
        ids = ids[:top_k]
    if top_p < 1:
        enough = Fraction(max(1, round(Fraction(top_p) * 2**30)), 2**30) * sum(weight[i] for i in ids)
        total, kept = 0, []
        for i in ids:
            if total >= enough:
                break
            kept.append(i)
            total += weight[i]
        ids = kept
    return [i for i in ids if weight[i] >= Fraction(min_p) * 2**40]


def kept_ids(scaled: Tensor, **kwargs: float) -> list[int]:
    kept = reference.keep(scaled, **kwargs)  # type: ignore[arg-type]
    return list(range(len(scaled))) if kept is None else kept.tolist()


@pytest.mark.parametrize("steps", [None, 0.5, 4.0])
@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 1500])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (0, 1.0, 0.0),
        (1, 1.0, 0.0),
        (40, 1.0, 0.0),
        (10**6, 1.0, 0.0),
        (0, 0.3, 0.0),
        (0, 0.9, 0.0),
        (0, 0.999999, 0.0),
        (0, 1e-12, 0.0),
        (0, 1.0, 0.05),
        (0, 1.0, 1.0),
        (0, 1.0, 1e-13),
        (50, 0.9, 0.02),
        (500, 0.99, 0.001),
    ],
)
def test_keep_is_its_definition(vocab: int, steps: float | None, top_k: int, top_p: float, min_p: float) -> None:
    scaled = reference.scale(random_scores(vocab, seed=vocab, steps=steps), 0.8)
    expected = keep_by_definition(scaled, top_k, top_p, min_p)
    assert sorted(kept_ids(scaled, top_k=top_k, top_p=top_p, min_p=min_p)) == sorted(expected)


@settings(deadline=None)
@given(
    values=st.lists(st.integers(-40, 0), min_size=1, max_size=40),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.1, 0.5, 0.75, 0.9, 1.0]) | st.floats(1e-9, 1.0),
    min_p=st.sampled_from([0.0, 0.1, 0.5]) | st.floats(0.0, 1.0),
)
def test_keep_is_its_definition_for_any_small_case(values: list[int], top_k: int, top_p: float, min_p: float) -> None:
    scaled = torch.tensor(values, dtype=torch.float32)
    scaled = scaled - scaled.amax()
    expected = keep_by_definition(scaled, top_k, top_p, min_p)
    assert sorted(kept_ids(scaled, top_k=top_k, top_p=top_p, min_p=min_p)) == sorted(expected)


def test_a_share_that_falls_on_a_border_keeps_no_more_than_it_needs() -> None:
    assert kept_ids(torch.zeros(8), top_k=0, top_p=0.5, min_p=0.0) == [0, 1, 2, 3]
    assert kept_ids(torch.zeros(8), top_k=0, top_p=0.5 + 1e-8, min_p=0.0) == [0, 1, 2, 3, 4]


def test_weights_are_rounded_to_even() -> None:
    assert reference.weights(torch.tensor([0.0, -math.inf, -100.0])).tolist() == [2**40, 0, 0]
    scaled = torch.linspace(-29, 0, 1000)
    expected = [round(Fraction(float(w)) * 2**40) for w in exp_f32(scaled)]
    assert reference.weights(scaled).tolist() == expected


@pytest.mark.parametrize("vocab", [1, 2, 100, 3000])
@pytest.mark.parametrize("steps", [None, 1.0])
def test_leading_is_the_first_in_order(vocab: int, steps: float | None) -> None:
    values = random_scores(vocab, steps=steps)
    values[::7] = -math.inf
    for count in (0, 1, 5, 64, vocab - 1, vocab, vocab + 5):
        assert reference.leading(values, count).tolist() == in_order(values)[:count]


def test_zeros_of_both_signs_are_equal() -> None:
    values = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    assert reference.leading(values, 3).tolist() == [0, 1, 2]
    assert reference.argmax(values) == 0


# Noise


def mix32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & WORD
    x ^= x >> 15
    x = x * 0x846CA68B & WORD
    return x ^ x >> 16


KEYS = [0, 1, 0xFFFFFFFF, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF]


@pytest.mark.parametrize("key", KEYS)
def test_hash32_in_unsigned_words(key: int) -> None:
    ids = [0, 1, 2, 77, 151935, 2**24, 2**31 - 1]
    expected = [mix32(mix32(i ^ key & WORD) + (key >> 32) & WORD) for i in ids]
    assert reference.hash32(key, torch.tensor(ids)).tolist() == expected


def test_hash32_never_gives_two_ids_the_same() -> None:
    hashes = reference.hash32(0x9E3779B97F4A7C15, torch.arange(200_000))
    assert len(hashes.unique()) == 200_000


def noise_by_definition(h: int) -> float:
    """Gumbel noise of hash h in double precision."""
    v = Fraction(2 * (h % 2**31) + 1, 2**33)
    minus_log_u = -math.log(v) if h < 2**31 else -math.log1p(-float(v))
    return -math.log(minus_log_u)


@pytest.mark.parametrize("key", KEYS)
def test_noise_is_accurate_in_both_tails(key: int) -> None:
    ids = torch.arange(20_000)
    hashes = reference.hash32(key, ids).tolist()
    expected = torch.tensor([noise_by_definition(h) for h in hashes], dtype=torch.float64)
    found = reference.gumbel(key, ids).double()
    assert torch.all((found - expected).abs() <= 4e-7 * expected.abs().clamp_min(1.0))


def test_noise_at_the_ends_of_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**31 + 255, 2**32 - 1]
    monkeypatch.setattr(reference, "hash32", lambda key, ids: torch.tensor(ends))
    found = reference.gumbel(0, torch.arange(len(ends))).tolist()
    assert found == pytest.approx([noise_by_definition(h) for h in ends], abs=2e-6)
    assert min(found) > -3.14
    assert max(found) < 22.9


def test_noise_does_not_depend_on_shape_or_place() -> None:
    key = 0xDEADBEEFCAFEF00D
    whole = reference.gumbel(key, torch.arange(10_007))
    for ids in (torch.tensor([5]), torch.arange(3, 20), torch.arange(10_006, 9_000, -3)):
        assert torch.equal(reference.gumbel(key, ids).view(torch.int32), whole[ids].view(torch.int32))


def test_noise_has_gumbels_distribution_and_no_memory() -> None:
    noise = torch.stack(
        [reference.gumbel(key * 0x9E3779B97F4A7C15 % 2**64, torch.arange(4000)) for key in range(50)]
    ).double()
    count = noise.numel()
    assert abs(float(noise.mean()) - 0.5772156649) < 5 * 1.2825 / math.sqrt(count)
    assert abs(float(noise.var()) - math.pi**2 / 6) < 5 * math.sqrt(4.4 * math.pi**4 / 36 / count)
    # Kolmogorov's bound for one in about a million.
    u = torch.exp(-torch.exp(-noise)).flatten().sort().values
    distance = (u - torch.arange(1, count + 1) / count).abs().max()
    assert float(distance) < 2.7 / math.sqrt(count)
    centred = noise - noise.mean()
    for lag in (1, 2, 64):
        assert abs(float((centred[:, lag:] * centred[:, :-lag]).mean() / noise.var())) < 5 / math.sqrt(count)
    assert abs(float((centred[1:] * centred[:-1]).mean() / noise.var())) < 5 / math.sqrt(count)


def test_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    # One token of weight 1 and many that together weigh as much: the far tail of the noise decides.
    vocab, draws = 20_001, 400
    scaled = torch.full((vocab,), -math.log(vocab - 1))
    scaled[0] = 0.0
    keys = [(i * 0x9E3779B97F4A7C15 + 12345) % 2**64 for i in range(draws)]
    common = sum(reference.choose(scaled, None, key) == 0 for key in keys)
    assert abs(common - draws / 2) < 5 * math.sqrt(draws) / 2


def test_choose_takes_the_lower_id_of_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "gumbel", lambda key, ids: torch.zeros(len(ids)))
    assert reference.choose(torch.tensor([-1.0, 0.0, 0.0]), None, 0) == 1
    assert reference.choose(torch.tensor([0.0, -1.0, 0.0, 0.0]), torch.tensor([3, 1, 2]), 0) == 2


def test_penalties_are_single_rounded_operations() -> None:
    scores = random_scores(200)
    in_prompt = torch.arange(200) % 3 == 0
    counts = torch.arange(200, dtype=torch.int32) % 5
    found = reference.penalize(scores, in_prompt, counts, repetition=1.1, presence=0.3, frequency=0.7)

    def f32(x: float) -> float:
        return float(torch.tensor(x, dtype=torch.float32))

    # Products, quotients and differences of two fp32 numbers, done in double and rounded, are correctly rounded.
    for i, score in enumerate(scores.tolist()):
        if in_prompt[i] or counts[i] > 0:
            score = f32(score / f32(1.1)) if score > 0 else f32(score * f32(1.1))
        score = f32(score - f32(int(counts[i]) * f32(0.7)))
        score = f32(score - (f32(0.3) if counts[i] > 0 else 0.0))
        assert float(found[i]) == score


def test_log_softmax_does_not_depend_on_what_is_asked() -> None:
    scores = random_scores(5003)
    scores[17] = -math.inf
    everything = reference.log_softmax(scores, torch.arange(5003))
    some = reference.log_softmax(scores, torch.tensor([9, 4000]))
    assert torch.equal(some, everything[torch.tensor([9, 4000])])
    assert torch.allclose(everything.double(), scores.double().log_softmax(0), atol=2e-6)
    assert float(everything[17]) == -math.inf
