import zlib

import pytest
import torch

from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import (
    RATES,
    Exl3Tensors,
    matrix_to_tiles,
    pack_states,
    positions_to_matrix,
    rate_of_words,
    step_bits,
    tile_rows_columns,
    unpack_signs,
    unpack_states,
    words_of_rate,
)

# exl3-format 2.4: states 0..3, 100 and 255 of u16[i] = 40503 i + 12345, and crc32 of all 256 as little-endian uint16.
UNPACK_CHECKS = {
    1.0: ([0xAE77, 0x5CEF, 0xB9DE, 0x73BC, 0x22B0, 0xD73B], 0x7662FA40),
    1.5: ([0x91E7, 0x479E, 0x8F3C, 0x3CF3, 0x1410, 0xC8F3], 0x944B5A9C),
    2.0: ([0xEAAF, 0xAABC, 0xAAF3, 0xABCE, 0x7CE4, 0xBAAB], 0x0CC14928),
    2.5: ([0xB18F, 0x8C79, 0x31E7, 0x8F39, 0x2D73, 0xAC63], 0xCD242E32),
    3.0: ([0xF0DE, 0x86F3, 0x379C, 0xBCE7, 0xF727, 0x9E1B], 0xC40D3FE6),
    3.5: ([0x7E9E, 0xE9E7, 0x4F39, 0xF39C, 0x190A, 0x8FD3], 0x8F6033D7),
    4.0: ([0x18BC, 0x8BCE, 0xBCE7, 0xCE70, 0x3980, 0x818B], 0xB1948730),
    5.0: ([0x9F79, 0xEF39, 0xE738, 0xE703, 0xC575, 0x64FB], 0xA766DCEC),
    6.0: ([0x1AF3, 0xBCE7, 0x39C0, 0x7030, 0x1BFD, 0x486B], 0x86FA3ADB),
    7.0: ([0xEDE7, 0xF39C, 0xCE06, 0x0303, 0x29FF, 0x2BDB], 0x84D184D4),
    8.0: ([0x4BCE, 0xCE70, 0x7030, 0x3039, 0x89B5, 0x0F4B], 0x43EB63ED),
}


def ramp_tile(rate: float) -> torch.Tensor:
    words = [(40503 * i + 12345) % 65536 for i in range(words_of_rate(rate))]
    return torch.tensor(words, dtype=torch.int32).to(torch.uint16).view(torch.int16)


def random_trellis(rate: float, *shape: int) -> torch.Tensor:
    return torch.randint(-32768, 32768, (*shape, words_of_rate(rate))).to(torch.int16)


@pytest.mark.parametrize("rate", RATES)
def test_unpack_meets_the_formats_check_sums(rate: float) -> None:
    samples, crc = UNPACK_CHECKS[rate]
    states = unpack_states(ramp_tile(rate))
    assert [int(states[t]) for t in (0, 1, 2, 3, 100, 255)] == samples
    assert zlib.crc32(states.to(torch.uint16).numpy().tobytes()) == crc


@pytest.mark.parametrize("rate", RATES)
def test_unpack_reads_the_sixteen_ring_bits_that_end_with_each_weight(rate: float) -> None:
    # The definition, bit by bit, against the vectorized windows; several tiles, so that none reads its neighbour.
    trellis = random_trellis(rate, 2, 3)
    states = unpack_states(trellis)
    num_bits = trellis.shape[-1] * 16
    for tile, got in zip(trellis.view(-1, trellis.shape[-1]), states.view(-1, 256), strict=True):
        words = [int(w) & 0xFFFF for w in tile]
        ring = [words[(b // 32) * 2 + (1 - b % 32 // 16)] >> (15 - b % 16) & 1 for b in range(num_bits)]
        end = 0
        for t, bits in enumerate(step_bits(rate)):
            end += bits
            want = sum(ring[(end - 16 + i) % num_bits] << (15 - i) for i in range(16))
            assert int(got[t]) == want, (rate, t)


@pytest.mark.parametrize("rate", RATES)
def test_pack_undoes_unpack(rate: float) -> None:
    trellis = random_trellis(rate, 3, 5)
    assert torch.equal(pack_states(unpack_states(trellis), rate), trellis)


def test_pack_uses_only_the_low_bits_of_each_state() -> None:
    states = unpack_states(random_trellis(3, 4))
    assert torch.equal(pack_states(states & 7, 3), pack_states(states, 3))


def test_tiles_and_matrices_are_inverse() -> None:
    matrix = torch.randn(48, 80)
    tiles = matrix_to_tiles(matrix)
    rows, columns = tile_rows_columns()
    assert sorted((16 * rows + columns).tolist()) == list(range(256))
    assert tiles[2, 1, 77] == matrix[32 + rows[77], 16 + columns[77]]
    assert torch.equal(positions_to_matrix(tiles.view(-1, 256).T.contiguous(), 3), matrix)


def test_legacy_signs() -> None:
    signs = unpack_signs(torch.tensor([0b101, -32768], dtype=torch.int16))
    assert signs.dtype == torch.float16
    assert torch.nonzero(signs == -1).flatten().tolist() == [0, 2, 31]
    assert int((signs == 1).sum()) == 29


def exl3(rate: float = 4, rows: int = 8, columns: int = 8, codebook: Codebook = Codebook.MUL1) -> Exl3Tensors:
    return Exl3Tensors(
        random_trellis(rate, rows, columns),
        torch.ones(rows * 16, dtype=torch.float16),
        torch.ones(columns * 16, dtype=torch.float16),
        codebook,
    )


@pytest.mark.parametrize("rate", RATES)
def test_rate_and_widths_follow_from_the_trellis(rate: float) -> None:
    tensors = exl3(rate, 8, 16)
    assert (tensors.rate, tensors.in_features, tensors.out_features) == (rate, 128, 256)


@pytest.mark.parametrize("words", [0, 8, 17, 72, 88, 104, 120, 144])
def test_unknown_word_counts_are_refused(words: int) -> None:
    with pytest.raises(ValueError, match=f"{words} words"):
        rate_of_words(words)


@pytest.mark.parametrize("codebook", [Codebook.MCG, Codebook.THREE_INST])
def test_half_rates_belong_to_mul1(codebook: Codebook) -> None:
    with pytest.raises(ValueError, match=r"2\.5 bits exist with codebook mul1 only"):
        exl3(2.5, codebook=codebook)


def test_shapes_and_dtypes_are_checked() -> None:
    with pytest.raises(ValueError, match="multiples of 128"):
        exl3(rows=9)
    good = exl3()
    with pytest.raises(ValueError, match=r"suh must be float16 \[128\]"):
        Exl3Tensors(good.trellis, good.suh.float(), good.svh, good.codebook)
    with pytest.raises(ValueError, match=r"svh must be float16 \[128\]"):
        Exl3Tensors(good.trellis, good.suh, good.svh[:64], good.codebook)
    with pytest.raises(ValueError, match="trellis must be int16"):
        Exl3Tensors(good.trellis.int(), good.suh, good.svh, good.codebook)
