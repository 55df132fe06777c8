import pytest
import torch

from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.encode import _regularize, best_scale, encode_linear, gaussian_scale, relative_error
from espalier.kernels.exl3.reference import effective_weight
from espalier.kernels.hadamard.reference import transform_inputs, transform_outputs

# exl3-format 5.5, whole linears or tiles with mul1: Viterbi below 4 bits, its beam from there on. Allowed above it: 25% and 15%.
VITERBI = {1.0: 0.520, 1.5: 0.370, 2.0: 0.261, 2.5: 0.185, 3.0: 0.131, 3.5: 0.0937}
BEAM = {4.0: 0.081, 5.0: 0.040, 6.0: 0.0206, 7.0: 0.0104, 8.0: 0.0050}
BOUNDS = {rate: 1.25 * error for rate, error in VITERBI.items()} | {rate: 1.15 * error for rate, error in BEAM.items()}


def uneven_weight(num_in: int = 128, num_out: int = 128) -> torch.Tensor:
    """Log-normal row and column scales, as linears have them, and an outlier."""
    weight = torch.randn(num_in, num_out) * torch.exp(torch.randn(num_in, 1) / 2) * torch.exp(torch.randn(num_out) / 2)
    weight[3, 5] = 20.0
    return weight * 0.03


@pytest.mark.parametrize("rate", BOUNDS)
def test_error_is_within_the_formats_bounds(rate: float) -> None:
    weight = uneven_weight()
    encoded = encode_linear(weight, rate, Codebook.MUL1, seed=0)
    assert encoded.rate == rate
    assert relative_error(weight, encoded) < BOUNDS[rate]


@pytest.mark.parametrize("codebook", [Codebook.MCG, Codebook.THREE_INST])
@pytest.mark.parametrize(("rate", "viterbi"), [(2.0, 0.263), (4.0, 0.0670)])
def test_other_codebooks(codebook: Codebook, rate: float, viterbi: float) -> None:
    weight = uneven_weight()
    encoded = encode_linear(weight, rate, codebook, seed=0)
    assert encoded.codebook is codebook
    assert relative_error(weight, encoded) < 1.3 * viterbi


def test_regular_weights_are_level_and_give_the_weight_back() -> None:
    weight = uneven_weight(256, 384)
    weight[:, 300:] = 0.0
    regular, suh, svh = _regularize(weight, seed=3)
    back = transform_outputs(transform_inputs(regular) * suh[:, None]) * svh
    torch.testing.assert_close(back, weight, rtol=0, atol=1e-6)
    assert float(regular.square().mean(1).sqrt().std()) < 0.15
    for block in (regular[:, :128], regular[:, 256:]):
        assert abs(float(block.square().mean().sqrt()) - 1.2437) < 0.03
    assert bool((svh[300:] == 0).all()) and bool((svh[:300] != 0).all())


def test_padding_stays_exactly_zero_and_costs_no_accuracy() -> None:
    weight = torch.zeros(256, 256)
    weight[:192, :160] = torch.randn(192, 160) * 0.05
    encoded = encode_linear(weight, 4, Codebook.MUL1, seed=0)
    assert bool((effective_weight(encoded)[:, 160:] == 0).all())
    assert relative_error(weight, encoded) < BOUNDS[4.0]


def test_an_all_zero_weight_encodes_to_zero() -> None:
    weight = torch.zeros(128, 128)
    encoded = encode_linear(weight, 6, Codebook.MUL1, seed=0)
    assert torch.equal(effective_weight(encoded), weight)
    assert relative_error(weight, encoded) == 0.0


def test_seed_decides_the_signs_and_nothing_else_is_random() -> None:
    weight = uneven_weight()
    first, again, other = (encode_linear(weight, 8, Codebook.MUL1, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.trellis, again.trellis) and torch.equal(first.suh, again.suh)
    assert not torch.equal(first.suh.sign(), other.suh.sign())


def test_scale_is_near_the_formats_table() -> None:
    # 5.5: .55 to .75 is best for a beam; the clipped mul1 codebook asks for less than the others.
    assert 0.55 <= gaussian_scale(6, Codebook.MUL1) <= 0.75
    assert gaussian_scale(6, Codebook.MUL1) < gaussian_scale(6, Codebook.MCG)


def test_long_tails_take_a_smaller_scale() -> None:
    gaussian = torch.randn(64, 256)
    long_tailed = gaussian * torch.randn(64, 256)
    scales = [best_scale(tiles / tiles.std() * 1.2437, 6, Codebook.MUL1) for tiles in (gaussian, long_tailed)]
    assert abs(scales[0] / gaussian_scale(6, Codebook.MUL1) - 1) < 0.1
    assert scales[1] < 0.85 * scales[0]
