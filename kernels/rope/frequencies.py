"""Rotary frequencies of the scaling types served: default, linear, llama3, yarn. Formulas and names follow transformers."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one model. Fields beyond `theta` are read by the types that name them.

    factor: linear, llama3, yarn. low_freq_factor, high_freq_factor: llama3. original_max_positions: llama3, yarn.
    beta_fast, beta_slow: yarn. attention_factor: yarn, multiplies cos and sin; None takes 0.1 ln(factor) + 1.
    """

    theta: float
    rope_type: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    @property
    def cos_sin_scale(self) -> float:
        """What cos and sin are multiplied by, so scores by its square."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """fp32 [head_dim / 2]: the angle of dimension pair i at position p is p times entry i. Computed in fp64, rounded once."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    inverse = config.theta**-exponents
    if config.rope_type == "linear":
        inverse = inverse / config.factor
    elif config.rope_type == "llama3":
        inverse = _llama3(config, inverse)
    elif config.rope_type == "yarn":
        inverse = _yarn(config, inverse, head_dim)
    return inverse.float()


def _llama3(config: RopeConfig, inverse: Tensor) -> Tensor:
    old, low, high = config.original_max_positions, config.low_freq_factor, config.high_freq_factor
    wavelength = 2 * math.pi / inverse
    blend = (old / wavelength - low) / (high - low)
    between = inverse * ((1 - blend) / config.factor + blend)
    scaled = torch.where(wavelength > old / low, inverse / config.factor, between)
    return torch.where(wavelength < old / high, inverse, scaled)


def _yarn(config: RopeConfig, inverse: Tensor, head_dim: int) -> Tensor:
    def dimension_of(rotations: float) -> float:
        """The dimension that turns so often over the original length."""
        turns = config.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.theta))

    low = max(math.floor(dimension_of(config.beta_fast)), 0)
    high = min(math.ceil(dimension_of(config.beta_slow)), head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
    ramp = ramp.clamp(0, 1)
    return inverse / config.factor * ramp + inverse * (1 - ramp)
