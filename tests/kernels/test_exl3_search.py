import pytest
import torch

from espalier.kernels.exl3 import codebook
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.encode import beam_width
from espalier.kernels.exl3.layout import RATES, pack_states, unpack_states
from espalier.kernels.exl3.search import BeamWidth, _sorting_network, search_tiles


def gaussian_tiles(num_tiles: int, std: float = 0.68) -> torch.Tensor:
    return torch.randn(num_tiles, 256) * std


@pytest.mark.parametrize("rate", RATES)
def test_rings_are_closed_and_close_to_what_is_wanted(rate: float) -> None:
    tiles = gaussian_tiles(6)
    states = search_tiles(tiles, rate, Codebook.MUL1, beam_width(rate))
    assert torch.equal(unpack_states(pack_states(states, rate)), states)
    found = codebook.values(Codebook.MUL1).float()[states.long()]
    error = float((found - tiles).square().mean().sqrt() / tiles.square().mean().sqrt())
    # No position may be left to chance: a single arbitrary value in a ring would show here from 3 bits on.
    assert error < 1.5 * 2.0**-rate


def test_a_tiles_ring_does_not_depend_on_its_neighbours() -> None:
    tiles = gaussian_tiles(7)
    together = search_tiles(tiles, 4, Codebook.MCG, BeamWidth(8, 4))
    alone = search_tiles(tiles[3:4], 4, Codebook.MCG, BeamWidth(8, 4))
    assert torch.equal(together[3:4], alone)


def test_more_paths_find_better_rings() -> None:
    tiles = gaussian_tiles(16)
    errors = []
    for num_paths in (2, 4, 8):
        states = search_tiles(tiles, 4, Codebook.MUL1, BeamWidth(num_paths, 4))
        errors.append(float((codebook.values(Codebook.MUL1).float()[states.long()] - tiles).square().mean()))
    assert errors[0] > errors[1] > errors[2]


def test_values_out_of_reach_take_the_nearest() -> None:
    tiles = torch.full((1, 256), 50.0)
    states = search_tiles(tiles, 8, Codebook.MUL1, BeamWidth(8, 4))
    assert float(codebook.values(Codebook.MUL1).float()[states.long()].mean()) > 2.5


def test_progress_is_told_and_may_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espalier.kernels.exl3.search._ELEMENTS_AT_ONCE", 1)
    tiles, done = gaussian_tiles(600), list[int]()
    search_tiles(tiles, 8, Codebook.MUL1, BeamWidth(2, 2), done.append)
    assert done == [512, 88]

    def stop(num_tiles: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        search_tiles(tiles, 8, Codebook.MUL1, BeamWidth(2, 2), stop)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_sorting_network_sorts(size: int) -> None:
    # The 0-1 principle: a network that sorts all sequences of zeros and ones sorts everything.
    sequences = torch.arange(1 << size) >> torch.arange(size)[:, None] & 1
    rows = list(sequences)
    for i, j in _sorting_network(size):
        rows[i], rows[j] = torch.minimum(rows[i], rows[j]), torch.maximum(rows[i], rows[j])
    assert torch.equal(torch.stack(rows), sequences.sort(dim=0).values)
