import pytest
import torch

from espalier.kernels.exl3 import pack
from espalier.kernels.exl3.layout import RATES, unpack_states, words_of_rate
from espalier.kernels.exl3.pack import PLANES, pack_trellis, unpack_words


def random_trellis(rate: float, rows: int = 8, columns: int = 3) -> torch.Tensor:
    return torch.randint(-32768, 32768, (rows, columns, words_of_rate(rate))).to(torch.int16)


def window_of_block(block: bytes, rate: float, lane: int, tile: int, last: int) -> int:
    """The 16 ring bits that end `last` bits before the end of the lane's own, found field by field as the module's docstring says."""
    own = int(8 * rate)
    places: dict[tuple[int, int, int], int] = {}  # (lane, tile, half byte) -> half byte of the block
    for plane in PLANES[rate]:
        for any_lane in range(32):
            for any_tile, first, count in plane:
                places.update({(any_lane, any_tile, first + i): len(places) + i for i in range(count)})

    def ring_bit(from_end: int) -> int:
        at_lane, bit = (lane - from_end // own) % 32, from_end % own
        position = places[at_lane, tile, bit // 4] * 4 + bit % 4
        return block[position // 8] >> position % 8 & 1

    return sum(ring_bit(last + i) << i for i in range(16))


@pytest.mark.parametrize("rate", RATES)
def test_every_window_is_where_the_layout_says(rate: float) -> None:
    trellis = random_trellis(rate)
    packed = pack_trellis(trellis)
    assert packed.shape == (2, 3, 32 * rate) and packed.is_contiguous()
    states = unpack_states(trellis)
    block = packed[1, 2].numpy().tobytes()
    ends = [int((j + 1) * rate) for j in range(8)]
    for lane in (0, 1, 2, 17, 31):
        for tile in range(4):
            found = [window_of_block(block, rate, lane, tile, ends[-1] - end) for end in ends]
            assert found == states[4 + tile, 2, 8 * lane : 8 * lane + 8].tolist()


@pytest.mark.parametrize("rate", RATES)
def test_there_and_back(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    trellis = random_trellis(rate, rows=16, columns=5)
    whole = pack_trellis(trellis)
    assert torch.equal(unpack_words(whole), trellis)
    monkeypatch.setattr(pack, "_CHUNK_BYTES", 1)  # one step at a time
    assert torch.equal(pack_trellis(trellis), whole)


def test_columns_concatenate() -> None:
    left, right = random_trellis(3.5, columns=2), random_trellis(3.5, columns=4)
    together = pack_trellis(torch.cat([left, right], dim=1))
    assert torch.equal(torch.cat([pack_trellis(left), pack_trellis(right)], dim=1), together)


def test_refuses_what_is_no_trellis() -> None:
    with pytest.raises(ValueError, match="trellis must be int16"):
        pack_trellis(random_trellis(4.0).int())
    with pytest.raises(ValueError, match="trellis must be int16"):
        pack_trellis(random_trellis(4.0, rows=6))
    with pytest.raises(ValueError, match="match no rate"):
        pack_trellis(torch.zeros((4, 8, 72), dtype=torch.int16))
