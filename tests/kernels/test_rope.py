"""Rotary tables and rotation: formulas, scaling types, table independent of its length."""

import math

import pytest
import torch

from espalier.kernels.rope.frequencies import RopeConfig, inverse_frequencies
from espalier.kernels.rope.reference import rope_table, rotate


def test_default_and_linear() -> None:
    plain = inverse_frequencies(RopeConfig(theta=10000.0), 64)
    assert plain[0] == 1.0
    assert plain[31].item() == pytest.approx(10000.0 ** (-62 / 64), rel=1e-7)
    assert torch.equal(inverse_frequencies(RopeConfig(theta=10000.0, rope_type="linear", factor=4.0), 64), plain / 4)


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    config = RopeConfig(theta=10000.0, rope_type="llama3", factor=8.0, original_max_positions=64)
    plain, scaled = inverse_frequencies(RopeConfig(theta=10000.0), 64), inverse_frequencies(config, 64)
    wavelength = 2 * math.pi / plain
    assert torch.equal(scaled[wavelength < 16], plain[wavelength < 16])
    assert torch.equal(scaled[wavelength > 64], plain[wavelength > 64] / 8)
    between = (wavelength > 16) & (wavelength < 64)
    assert between.any()
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


def test_yarn_scales_slow_dimensions_and_cos_sin() -> None:
    config = RopeConfig(theta=1e6, rope_type="yarn", factor=4.0, original_max_positions=32)
    plain, scaled = inverse_frequencies(RopeConfig(theta=1e6), 128), inverse_frequencies(config, 128)
    torch.testing.assert_close(scaled[-1], plain[-1] / 4)
    assert (scaled <= plain).all()
    assert config.cos_sin_scale == pytest.approx(0.1 * math.log(4) + 1)
    assert RopeConfig(theta=1e6, rope_type="yarn", factor=4.0, attention_factor=1.5).cos_sin_scale == 1.5


def test_table_entries_do_not_depend_on_its_length() -> None:
    frequencies = inverse_frequencies(RopeConfig(theta=10000.0), 64)
    long_cos, long_sin = rope_table(frequencies, 9000, 1.0)
    for length in (1, 17, 4096, 4097):
        cos, sin = rope_table(frequencies, length, 1.0)
        assert torch.equal(cos, long_cos[:length])
        assert torch.equal(sin, long_sin[:length])
    angle = torch.tensor(8191.0) * frequencies
    torch.testing.assert_close(long_cos[8191], torch.cos(angle.double()).float(), rtol=0, atol=1e-7)


def test_table_does_not_depend_on_threads() -> None:
    frequencies = inverse_frequencies(RopeConfig(theta=500000.0), 128)
    cos, sin = rope_table(frequencies, 8192, 1.0)
    torch.set_num_threads(2)
    try:
        again = rope_table(frequencies, 8192, 1.0)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(again[0], cos)
    assert torch.equal(again[1], sin)


def test_rotation_turns_halves_against_each_other() -> None:
    cos, sin = rope_table(inverse_frequencies(RopeConfig(theta=10000.0), 8), 50, 1.0)
    x = torch.randn(3, 2, 8)
    positions = torch.tensor([0, 7, 49])
    y = rotate(x, cos[positions], sin[positions])
    assert torch.equal(y[0], x[0])
    as_complex = torch.complex(x[..., :4].double(), x[..., 4:].double())
    turned = as_complex * torch.complex(cos[positions].double(), sin[positions].double())[:, None]
    torch.testing.assert_close(y.double(), torch.cat([turned.real, turned.imag], -1), rtol=1e-6, atol=1e-6)
    assert torch.equal(rotate(x[1:2], cos[positions][1:2], sin[positions][1:2]), y[1:2])
