"""A weight -> a quantized linear, without calibration data: scale, rotate, search every tile, refit the scales.

Follows exl3-format 5.1, 5.4 and 5.5 with the identity in place of a Hessian. It serves the default model, tests and small
experiments; checkpoints for production come from converters that calibrate. Knows no files and no models.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from espalier.kernels.exl3 import codebook
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import (
    BLOCK,
    TILE,
    TILE_WEIGHTS,
    Exl3Tensors,
    matrix_to_tiles,
    pack_states,
    positions_to_matrix,
    unpack_states,
)
from espalier.kernels.exl3.reference import effective_weight
from espalier.kernels.exl3.search import BeamWidth, search_tiles
from espalier.kernels.hadamard.reference import transform_inputs, transform_outputs

# RMS of a regularized weight before the scale search: the 3inst codebook's, used for all three.
_REGULAR_RMS = 1.24371088
_ZERO = 1e-30
# Scales tried on Gaussian tiles, and on a sample of each linear around the best of those.
_SCALES = tuple(0.5 + 0.075 * i for i in range(8))
_SCALE_STEPS = 64
_SCALE_SAMPLE_TILES = 96
_SCALE_FACTORS = (0.7, 0.8, 0.9, 1.0, 1.1)
_LINEAR_SAMPLE_TILES = 48


def beam_width(rate: float) -> BeamWidth:
    """Paths kept so that the error stays within the bounds of exl3-format 5.5: 15% of its beam from 4 bits on, 25% of Viterbi below."""
    return BeamWidth(num_paths=8 if rate >= 4 else 16, num_symbols=4)


def encode_linear(
    weight: Tensor, rate: float, name: Codebook, seed: int, on_tiles: Callable[[int], None] | None = None
) -> Exl3Tensors:
    """fp32 weight [in, out], both multiples of 128 -> its EXL3 tensors at `rate` bits.

    seed: of the random signs. on_tiles: told how many more tiles are done, now and then; what it raises ends the work.
    All-zero columns get svh = 0, so that padding stays exactly zero.
    """
    num_in, num_out = weight.shape
    assert weight.dtype == torch.float32 and num_in % BLOCK == 0 and num_out % BLOCK == 0
    regular, suh, svh = _regularize(weight, seed)
    tiles = matrix_to_tiles(regular).view(-1, TILE_WEIGHTS)
    scale = best_scale(tiles, rate, name)
    suh = suh / scale
    states = search_tiles(tiles * scale, rate, name, beam_width(rate), on_tiles)
    trellis = pack_states(states, rate)
    assert torch.equal(unpack_states(trellis), states), "the search returned an open ring"
    values = codebook.values(name).float().index_select(0, states.T.reshape(-1)).view(TILE_WEIGHTS, -1)
    suh, svh = _refit(weight, positions_to_matrix(values, num_in // TILE), suh, svh)
    return Exl3Tensors(trellis.view(num_in // TILE, num_out // TILE, -1), suh.half(), svh.half(), name)


def relative_error(weight: Tensor, tensors: Exl3Tensors) -> float:
    """RMS of decoded minus wanted weight over RMS of the wanted one; 0 for an all-zero weight."""
    norm = float(weight.norm())
    return float((effective_weight(tensors) - weight).norm()) / norm if norm > 0 else 0.0


def _regularize(weight: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (regular [in, out], suh [in], svh [out]) with weight = diag(suh) H regular H diag(svh), all fp32.

    The rows and columns of `regular` have about the same RMS, 1.2437; its values are close to Gaussian. In a block that is partly padding
    the transforms spread the energy over the whole block: blocks are levelled, so that a half-empty one uses the codebook fully too.
    """
    num_in, num_out = weight.shape
    generator = torch.Generator().manual_seed(seed)

    def signs(size: int) -> Tensor:
        return torch.randint(0, 2, (size,), generator=generator).float() * 2 - 1

    suh, svh = signs(num_in), signs(num_out)
    columns = _rms(weight, 0)
    empty = columns < _ZERO
    columns = torch.where(empty, 0.1, columns / columns.mean().clamp(min=_ZERO))
    svh *= columns
    regular = transform_outputs(weight / svh)
    block_rms = _nonzero(_rms(regular.view(num_in, -1, BLOCK), (0, 2)))
    level = (block_rms / block_rms.max()).repeat_interleave(BLOCK)
    svh *= level
    regular /= level
    suh *= _nonzero(_rms(regular, 1)) / -_REGULAR_RMS
    regular = transform_inputs(regular / suh[:, None])
    level = (_nonzero(_rms(regular.view(-1, BLOCK, num_out), (1, 2))) / _REGULAR_RMS).repeat_interleave(BLOCK)
    suh *= level
    regular /= level[:, None]
    return regular, suh, torch.where(empty, 0.0, svh)


def _rms(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    return x.square().mean(dim=dim).sqrt()


def _nonzero(scales: Tensor) -> Tensor:
    return torch.where(scales < _ZERO, 0.1, scales)


def best_scale(tiles: Tensor, rate: float, name: Codebook) -> float:
    """The factor on regular weights [tiles, 256] that gives the smallest error at this rate, found on a sample of them.

    Most linears are as good as Gaussian after both transforms; some, an embedding table used as the head among them, keep longer tails
    and want a smaller factor.
    """
    generator = torch.Generator().manual_seed(0)
    sample = tiles[torch.randperm(len(tiles), generator=generator)[:_LINEAR_SAMPLE_TILES]]
    usual = gaussian_scale(rate, name)
    return _search_scale(sample, rate, name, [usual * factor for factor in _SCALE_FACTORS])


@functools.cache
def gaussian_scale(rate: float, name: Codebook) -> float:
    """The best factor for Gaussian weights."""
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(_SCALE_SAMPLE_TILES, TILE_WEIGHTS, generator=generator) * _REGULAR_RMS
    return _search_scale(sample, rate, name, _SCALES)


def _search_scale(sample: Tensor, rate: float, name: Codebook, scales: Sequence[float]) -> float:
    """The best of evenly spaced scales on tiles [n, 256], refined by a parabola through its neighbours."""
    factors = torch.tensor(scales)
    wanted = (sample * factors[:, None, None]).view(-1, TILE_WEIGHTS)
    states = search_tiles(wanted, rate, name, beam_width(rate))
    found = codebook.values(name).float()[states.long()]
    errors = (found - wanted).square().view(len(scales), -1).mean(1) / factors.square()
    best = int(errors.argmin().clamp(1, len(scales) - 2))
    left, middle, right = errors[best - 1 : best + 2].tolist()
    curvature = left - 2 * middle + right
    offset = max(-1.0, min(1.0, (left - right) / (2 * curvature))) if curvature > 0 else 0.0
    scale = scales[best] + offset * (scales[1] - scales[0])
    # On a grid much finer than the optimum is sharp: another machine's last bits shall not give every tile another ring.
    return round(scale * _SCALE_STEPS) / _SCALE_STEPS


def _refit(weight: Tensor, inner: Tensor, suh: Tensor, svh: Tensor) -> tuple[Tensor, Tensor]:
    """Two rounds of least squares of svh (by column) and suh (by row), the decoded inner weight fixed."""
    half_way = transform_inputs(inner)
    for _ in range(2):
        basis = transform_outputs(half_way * suh[:, None])
        svh = torch.where(svh == 0, 0.0, _fit(basis, weight, svh, 0))
        basis = transform_outputs(half_way) * svh
        suh = _fit(basis, weight, suh, 1)
    return suh, svh


def _fit(basis: Tensor, weight: Tensor, scales: Tensor, dim: int) -> Tensor:
    """Least squares scales with basis * scales = weight along `dim`; where the basis is zero, as they were."""
    power = basis.square().sum(dim)
    return torch.where(power > 0, (basis * weight).sum(dim) / power.clamp(min=_ZERO), scales)
