"""Which shapes rounds are computed in: one captured graph each. Pure; knows no device.

A round is padded to the next shape that holds it. No row's bits depend on the shape, so any list of shapes serves; a longer one costs graphs
and a shorter one padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

_FIRST_CONTEXT = 1024
_CONTEXT_GROWTH = 4
_FIRST_MIXED_ROWS = 16
# Prompts that come alone, or beside a few: logits are computed for every lane that there is room for, rows or not.
_FEW_LANES = 8


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
    """All shapes of a track. decode_rows, mixed_rows, mixed_lanes, contexts: ascending. The last of mixed_lanes: lanes of the engine."""

    decode_rows: tuple[int, ...]
    mixed_rows: tuple[int, ...]
    mixed_lanes: tuple[int, ...]
    contexts: tuple[int, ...]

    @staticmethod
    def plan(max_lanes: int, batch_tokens: int, max_context: int) -> "RoundShapes":
        """Of a track that does everything: row counts double up to the limits, contexts grow four times as fast."""
        return RoundShapes(
            decode_rows=_doubling(1, max_lanes, 2),
            mixed_rows=_doubling(_FIRST_MIXED_ROWS, batch_tokens, 2),
            mixed_lanes=(_FEW_LANES, max_lanes) if max_lanes > _FEW_LANES else (max_lanes,),
            contexts=_doubling(_FIRST_CONTEXT, max_context, _CONTEXT_GROWTH),
        )

    def decoding(self) -> "RoundShapes":
        """Of a track whose lanes have one row each."""
        return replace(self, mixed_rows=())

    def prompts(self) -> "RoundShapes":
        """Of a track that leaves decoding to another."""
        return replace(self, decode_rows=())

    def all(self) -> list[RoundShape]:
        """The largest first, so that what is allocated while capturing is allocated once."""
        mixed = {
            _mixed(rows, lanes, context)
            for rows in self.mixed_rows
            for lanes in self.mixed_lanes
            for context in self.contexts
        }
        decode = {
            _decode(greedy, rows, context)
            for greedy in (False, True)
            for rows in self.decode_rows
            for context in self.contexts
        }
        return sorted(mixed | decode, key=lambda shape: (shape.rows, shape.lanes, shape.context, shape), reverse=True)

    def choose(self, need: RoundNeed) -> RoundShape:
        """The smallest shape that holds a round."""
        context = _first(self.contexts, need.context)
        if need.mixed or not self.decode_rows:
            return _mixed(
                _first(self.mixed_rows, need.num_rows), _first(self.mixed_lanes, max(need.num_lanes, 1)), context
            )
        return _decode(need.greedy, _first(self.decode_rows, need.num_rows), context)


def _mixed(rows: int, lanes: int, context: int) -> RoundShape:
    lanes = min(rows, lanes)
    return RoundShape(mixed=True, greedy=False, rows=rows, lanes=lanes, samples=lanes, context=context)


def _decode(greedy: bool, rows: int, context: int) -> RoundShape:
    return RoundShape(mixed=False, greedy=greedy, rows=rows, lanes=rows, samples=rows, context=context)


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
