"""Which shapes rounds are computed in: one captured graph each. Pure; knows no device.

A round is padded to the next shape that holds it. No row's bits depend on the shape, so any list of shapes serves; a longer one costs graphs
and a shorter one padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

_FIRST_CONTEXT = 1024
_CONTEXT_GROWTH = 4
_FIRST_MIXED_ROWS = 16


@dataclass(frozen=True, slots=True, order=True)
class RoundShape:
    """What a graph is captured for.

    mixed: lanes may have many rows; else each has one. rows, lanes, samples: padded counts. context: positions of the longest lane, at most.
    greedy: no row draws by chance, reports log probabilities or has penalties.
    """

    mixed: bool
    greedy: bool
    rows: int
    lanes: int
    samples: int
    context: int


@dataclass(frozen=True, slots=True)
class RoundNeed:
    """What a round has. Lanes without a sampled row count in num_lanes only."""

    num_rows: int
    num_lanes: int
    num_samples: int
    context: int
    greedy: bool

    @property
    def mixed(self) -> bool:
        """Whether some lane has several rows, or a row that is not sampled from."""
        return self.num_rows > self.num_lanes or self.num_samples < self.num_rows


@dataclass(frozen=True, slots=True)
class RoundShapes:
    """All shapes of a track. decode_rows, mixed_rows, contexts: ascending. max_lanes: of the engine."""

    decode_rows: tuple[int, ...]
    mixed_rows: tuple[int, ...]
    contexts: tuple[int, ...]
    max_lanes: int

    @staticmethod
    def plan(max_lanes: int, batch_tokens: int, max_context: int) -> "RoundShapes":
        """Of a track that does everything: row counts double up to the limits, contexts grow four times as fast."""
        return RoundShapes(
            decode_rows=_doubling(1, max_lanes, 2),
            mixed_rows=_doubling(_FIRST_MIXED_ROWS, batch_tokens, 2),
            contexts=_doubling(_FIRST_CONTEXT, max_context, _CONTEXT_GROWTH),
            max_lanes=max_lanes,
        )

    def decoding(self) -> "RoundShapes":
        """Of a track whose lanes have one row each."""
        return replace(self, mixed_rows=())

    def prompts(self) -> "RoundShapes":
        """Of a track that leaves decoding to another."""
        return replace(self, decode_rows=())

    def all(self) -> list[RoundShape]:
        """The largest first, so that what is allocated while capturing is allocated once."""
        shapes = [
            self._shape(mixed, greedy, rows, context)
            for mixed, greedy in ((True, False), (False, False), (False, True))
            for rows in (self.mixed_rows if mixed else self.decode_rows)
            for context in self.contexts
        ]
        return sorted(shapes, key=lambda shape: (shape.rows, shape.context), reverse=True)

    def choose(self, need: RoundNeed) -> RoundShape:
        """The smallest shape that holds a round."""
        mixed = need.mixed or not self.decode_rows
        rows = _first(self.mixed_rows if mixed else self.decode_rows, need.num_rows)
        return self._shape(mixed, need.greedy and not mixed, rows, _first(self.contexts, need.context))

    def _shape(self, mixed: bool, greedy: bool, rows: int, context: int) -> RoundShape:
        lanes = min(rows, self.max_lanes)
        return RoundShape(mixed=mixed, greedy=greedy, rows=rows, lanes=lanes, samples=lanes, context=context)


def _doubling(first: int, last: int, factor: int) -> tuple[int, ...]:
    """first, first * factor, ... below last, and last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)


def _first(sizes: Sequence[int], needed: int) -> int:
    found = next((size for size in sizes if size >= needed), None)
    assert found is not None, f"{needed} is more than {sizes[-1]}, the most that was planned for"
    return found
