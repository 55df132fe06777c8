"""What the host tells the device of one round, as words of one int32 buffer: one copy a round, whatever the round is made of.

Knows a round's shape and where its fields lie; what the numbers mean is said by `kernels/round/layout.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from espalier.kernels.attention.work import decode_shares, most_tiles, prompt_tiles
from espalier.replicas.gpu.rounds import RoundShape

Words = npt.NDArray[np.int32]

# Lanes of one row go to attention's decode form, whatever has more to the prompt form: its partial sums need no room for sixteen rows a lane.
DECODE_ROWS = 1

_ALIGNMENT = 4  # words: kernels read 16 bytes at a time
_PADDING = {"row_lane": -1, "lane_slot": -1, "sampled_rows": -1, "tiles": -1, "updates": -1}  # others: 0
# A decode round needs room for a block a lane and for a sequence that begins; a prompt's blocks come with its rows.
_DECODE_UPDATES = 64
_MIXED_UPDATES = 1280


@dataclass(frozen=True, slots=True)
class InputFields:
    """Where each field of a round of one shape lies.

    place: where the tokens drawn go. updates: words of the device's state that change, as (place, value). Others: `RoundInputs`, `LaneTable`.
    group: query heads that share a key-value head.
    """

    offsets: Mapping[str, tuple[int, int]]
    num_words: int
    num_updates: int
    group: int

    @staticmethod
    def of(shape: RoundShape, group: int) -> "InputFields":
        """For rounds of this shape."""
        updates = max(_MIXED_UPDATES if shape.mixed else _DECODE_UPDATES, 2 * shape.lanes)
        sizes = {
            "place": 1,
            "row_lane": shape.rows,
            "given": shape.rows,
            "lane_slot": shape.lanes,
            "first_row": shape.lanes,
            "num_rows": shape.lanes,
            "start": shape.lanes,
            "observes": shape.lanes,
            "sampled_rows": shape.samples,
            "tiles": 2 * most_tiles(shape.rows, shape.lanes, group, DECODE_ROWS) if shape.mixed else 0,
            "shares": 3 * shape.lanes if shape.mixed else 0,
            "updates": 2 * updates,
        }
        offsets: dict[str, tuple[int, int]] = {}
        end = 0
        for name, size in sizes.items():
            offsets[name] = (end, size)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return InputFields(offsets, end, updates, group)

    def padding(self) -> Words:
        """A round of nothing: what a buffer holds before its fields are filled."""
        words = np.zeros(self.num_words, dtype=np.int32)
        for name, value in _PADDING.items():
            self.host(words, name)[:] = value
        return words

    def share_out(self, words: Words) -> None:
        """Fills in, from the lanes of a mixed round, who does what of its attention."""
        num_rows, start = self.host(words, "num_rows"), self.host(words, "start")
        tiles = prompt_tiles(num_rows, start, self.group, DECODE_ROWS)
        self.host(words, "tiles")[: tiles.size] = tiles.ravel()
        self.host(words, "shares")[:] = decode_shares(num_rows, start, DECODE_ROWS).ravel()

    def host(self, words: Words, name: str) -> Words:
        """One field of a buffer on the host; a view."""
        first, size = self.offsets[name]
        return words[first : first + size]

    def device(self, words: Tensor, name: str) -> Tensor:
        """One field of a buffer on the device; a view."""
        first, size = self.offsets[name]
        return words[first : first + size]
