"""Finds, for each tile of wanted values, a closed ring of states whose codebook values come close: a beam search, over many tiles at once.

A walk goes round the ring once and a little further. Every step extends each kept path by the few symbols whose values lie nearest
to the wanted one (looked up in the codebook, sorted per node), keeps the paths that are cheapest up to their best next step, and
drops those that meet a cheaper one in the same node. The second visit to the first positions then *joins* the first one where that
is cheapest, which closes the ring. Any such ring is a valid tile (exl3-format 5.5). Each tile's result depends on that tile alone.
Knows no scales and no rotations.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels.exl3 import codebook
from espalier.kernels.exl3.codebook import NUM_STATES, Codebook
from espalier.kernels.exl3.layout import STATE_BITS, TILE_WEIGHTS, step_bits

# Positions visited twice, where the ring may close. More of them find a cheaper place.
_OVERLAP = 64
# Wanted values are binned to look up their neighbours among a node's 2^d sorted values: 2^_BIN_BITS bins for each of those.
_BIN_BITS = 4
# Paths x symbols x tiles of one batch: few enough for a core's cache, enough that the cost of starting an operation is small.
_ELEMENTS_AT_ONCE = 1 << 18
# A path's cost is a double; its lowest bits carry where it came from, so that sorting costs moves both.
_SYMBOL_MASK = 0xFFFF
_PARENT_SHIFT = 16
_PAYLOAD_BITS = 22
_PAYLOAD_MASK = (1 << _PAYLOAD_BITS) - 1
_DEAD = 1e30
# Free bits of a joining bridge that are tried; further ones are zero. More of them cost more time than they gain.
_MAX_FREE_BITS = 1


@dataclass(frozen=True, slots=True)
class BeamWidth:
    """num_paths: paths kept, a power of two up to 64. num_symbols: nearest symbols tried for each, at most 2^rate."""

    num_paths: int
    num_symbols: int


@dataclass(frozen=True, slots=True)
class _Trellis:
    """One position's edges: states sorted by (in-node, value), and how to find a wanted value's neighbours there.

    A state's *place* is its index in that order. A *cell* is node * num_bins + the bin of the wanted value.
    """

    values: Tensor  # fp64 [65536], by place
    states: Tensor  # int64 [65536], by place
    window: Tensor  # int32 [cells]: first place of the nearest values
    nearest: Tensor  # fp32 [cells]: the value nearest to the bin's centre
    num_bins: int
    low: float  # value of the lowest bin's lower edge
    bin_width: float
    num_symbols: int

    def bins(self, wanted: Tensor) -> Tensor:
        """fp64 -> int64 of the same shape."""
        return ((wanted - self.low) / self.bin_width).long().clamp_(0, self.num_bins - 1)


@functools.lru_cache(maxsize=8)
def _trellis(name: Codebook, bits: int, num_symbols: int) -> _Trellis:
    values = codebook.values(name).double()
    num_nodes, num_values = NUM_STATES >> bits, 1 << bits
    by_node, order = values.view(num_nodes, num_values).sort(dim=1)
    num_bins = num_values << _BIN_BITS
    low, high = float(values.min()), float(values.max())
    width = (high - low) / num_bins
    centres = (low + width * (torch.arange(num_bins, dtype=torch.float64) + 0.5)).expand(num_nodes, -1).contiguous()
    nodes = torch.arange(num_nodes)[:, None] * num_values
    nearest = torch.searchsorted(((by_node[:, :-1] + by_node[:, 1:]) / 2).contiguous(), centres)
    # A window moves up by one where the value it would take is as near as the one it would leave.
    first = torch.searchsorted(((by_node[:, :-num_symbols] + by_node[:, num_symbols:]) / 2).contiguous(), centres)
    return _Trellis(
        values=by_node.flatten(),
        states=(order + nodes).flatten(),
        window=(first + nodes).flatten().int(),
        nearest=by_node.gather(1, nearest).flatten().float(),
        num_bins=num_bins,
        low=low,
        bin_width=width,
        num_symbols=num_symbols,
    )


def search_tiles(
    tiles: Tensor, rate: float, name: Codebook, width: BeamWidth, on_done: Callable[[int], None] | None = None
) -> Tensor:
    """Wanted values [tiles, 256] in stream order -> states, int32 [tiles, 256], a valid ring each.

    on_done: told how many more tiles are done, now and then; what it raises ends the search.
    """
    assert width.num_paths & (width.num_paths - 1) == 0 and width.num_paths <= 64
    rings = []
    for part in torch.split(tiles, max(512, _ELEMENTS_AT_ONCE // (width.num_paths * width.num_symbols))):
        rings.append(_Walk(part.T.double(), rate, name, width).ring())
        if on_done is not None:
            on_done(len(part))
    return torch.cat(rings)


class _Walk:
    """The search over one batch of tiles. Arrays are [.., tiles], so that each operation runs over many tiles."""

    def __init__(self, wanted: Tensor, rate: float, name: Codebook, width: BeamWidth) -> None:
        self.wanted = wanted.contiguous()  # fp64 [256, tiles]
        self.num_tiles = wanted.shape[1]
        self.bits = step_bits(rate)
        self.by_state = codebook.values(name).double()
        self.num_paths = width.num_paths
        self.trellises = {bits: _trellis(name, bits, min(width.num_symbols, 1 << bits)) for bits in set(self.bits)}
        self.parents = (torch.arange(self.num_paths) << _PARENT_SHIFT).view(-1, 1, 1)

    def ring(self) -> Tensor:
        # First round: any node may start it; its first steps are poor, and replaced by the second.
        spread = torch.arange(self.num_paths) * (self._num_nodes(0) // self.num_paths)
        nodes = spread[:, None].expand(-1, self.num_tiles).contiguous()
        costs = torch.zeros((self.num_paths, self.num_tiles), dtype=torch.float64)
        history: list[Tensor] = []
        for t in range(TILE_WEIGHTS):
            nodes, costs, steps = self._step(t, nodes, costs)
            history.append(steps)
        path = torch.zeros(self.num_tiles, dtype=torch.int64)  # the first is the most promising
        states = torch.empty((TILE_WEIGHTS, self.num_tiles), dtype=torch.int64)
        end = nodes[0]
        for t in reversed(range(TILE_WEIGHTS)):
            states[t], path = self._step_back(t, history[t], path)
        self._close(states, end)
        return states.T.int()

    def _num_nodes(self, t: int) -> int:
        return 1 << (STATE_BITS - self.bits[t % TILE_WEIGHTS])

    def _step(self, t: int, nodes: Tensor, costs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Extend all paths by position t. nodes int64, costs fp64, both [paths, tiles].

        Returns the same for t + 1, the most promising path first, and what to remember: place and parent, int32 [paths, tiles].
        """
        trellis, wanted = self.trellises[self.bits[t]], self.wanted[t]
        cells = torch.add(trellis.bins(wanted), nodes, alpha=trellis.num_bins)
        first = trellis.window.index_select(0, cells.view(-1)).long().view(self.num_paths, 1, self.num_tiles)
        places = first + torch.arange(trellis.num_symbols).view(1, -1, 1)
        error = _at(trellis.values, places).sub_(wanted)
        promise = torch.addcmul(costs[:, None], error, error)
        next_error = self._next_error(t, _at(trellis.states, places))
        promise.addcmul_(next_error, next_error)
        places |= self.parents
        promise.view(torch.int64).bitwise_and_(~_PAYLOAD_MASK).bitwise_or_(places)
        kept = torch.stack(_cheapest(list(promise.unbind(0))))
        origin = kept.view(torch.int64) & _PAYLOAD_MASK
        states = _at(trellis.states, origin & _SYMBOL_MASK)
        next_nodes = states & (self._num_nodes(t + 1) - 1)
        self._drop_duplicates(next_nodes, kept)
        next_error = self._next_error(t, states)
        return next_nodes, kept.addcmul_(next_error, next_error, value=-1), origin.int()

    def _next_error(self, t: int, states: Tensor) -> Tensor:
        """fp64, of states' shape: how near the next position can come to its wanted value after these states at t."""
        after = (t + 1) % TILE_WEIGHTS
        trellis, wanted = self.trellises[self.bits[after]], self.wanted[after]
        cells = torch.add(trellis.bins(wanted), states & (self._num_nodes(after) - 1), alpha=trellis.num_bins)
        return _at(trellis.nearest, cells).double().sub_(wanted)

    def _drop_duplicates(self, nodes: Tensor, costs: Tensor) -> None:
        same = torch.zeros(nodes.shape, dtype=torch.bool)
        for distance in range(1, self.num_paths):
            same[distance:] |= nodes[distance:] == nodes[:-distance]
        torch.maximum(costs, same.double().mul_(_DEAD), out=costs)

    def _step_back(self, t: int, steps: Tensor, path: Tensor) -> tuple[Tensor, Tensor]:
        """The state at t of each tile's `path` and the path before it, int64 [tiles]."""
        origin = steps.gather(0, path[None])[0].long()
        return _at(self.trellises[self.bits[t]].states, origin & _SYMBOL_MASK), origin >> _PARENT_SHIFT

    def _close(self, states: Tensor, end: Tensor) -> None:
        """Second round from node `end`, the first round's best: replaces states [256, tiles] up to the cheapest join."""
        nodes = end.expand(self.num_paths, -1).clone()
        costs = torch.full((self.num_paths, self.num_tiles), _DEAD, dtype=torch.float64)
        costs[0] = 0.0
        reach = _OVERLAP + STATE_BITS
        first_errors = _at(self.by_state, states[:reach]).sub_(self.wanted[:reach]).square_()
        first_costs = torch.cat([torch.zeros(1, self.num_tiles, dtype=torch.float64), first_errors.cumsum(0)])
        best_cost = torch.full((self.num_tiles,), _DEAD, dtype=torch.float64)
        best = torch.zeros((3, self.num_tiles), dtype=torch.int64)  # position, path, bits of the bridge
        history: list[Tensor] = []
        for t in range(_OVERLAP):
            length, cost, path, bridge = self._bridge(t, nodes, costs, states)
            cost -= first_costs[t + length]
            better = cost < best_cost
            best_cost = torch.minimum(best_cost, cost)
            best = torch.where(better, torch.stack([torch.full_like(path, t), path, bridge]), best)
            nodes, costs, steps = self._step(t, nodes, costs)
            history.append(steps)
        join, path, bridge = best
        for t in reversed(range(_OVERLAP)):
            new_states, parent = self._step_back(t, history[t], path)
            before = t < join
            states[t] = torch.where(before, new_states, states[t])
            path = torch.where(before, parent, path)
        for t in range(_OVERLAP):
            here = torch.nonzero(join == t).flatten()
            for i, shift in enumerate(self._bridge_shifts(t)):
                states[t + i, here] = (bridge[here] >> shift) & _SYMBOL_MASK

    def _bridge_shifts(self, t: int) -> list[int]:
        """For a bridge from position t: how far its bits are above each of its states. As many steps as fill a node."""
        lengths: list[int] = []
        while sum(lengths) < STATE_BITS - self.bits[t + len(lengths)]:
            lengths.append(self.bits[t + len(lengths)])
        return [sum(lengths[i + 1 :]) for i in range(len(lengths))]

    def _bridge(self, t: int, nodes: Tensor, costs: Tensor, states: Tensor) -> tuple[int, Tensor, Tensor, Tensor]:
        """The cheapest way from any path before position t into the first round's own path.

        Returns its length in steps, and by tile its cost (the path's included), the path, and its bits: in-node, free bits, out-node.
        """
        shifts = self._bridge_shifts(t)
        length = len(shifts)
        total = shifts[0] + self.bits[t]
        # The out-node is what the state after the bridge is made of, without its own symbol.
        out_bits = STATE_BITS - self.bits[t + length]
        out_nodes = states[t + length] >> self.bits[t + length]
        num_free = total - out_bits
        tried = min(num_free, _MAX_FREE_BITS)
        free = torch.arange(1 << tried) << (out_bits + num_free - tried)
        bits = (nodes << total)[:, None] | free[:, None] | out_nodes  # [paths, choices, tiles]
        cost = costs[:, None].expand_as(bits).clone()
        for i, shift in enumerate(shifts):
            error = _at(self.by_state, (bits >> shift).bitwise_and_(_SYMBOL_MASK)).sub_(self.wanted[t + i])
            cost.addcmul_(error, error)
        cost, choice = cost.view(-1, self.num_tiles).min(dim=0)
        return length, cost, choice >> tried, bits.view(-1, self.num_tiles).gather(0, choice[None])[0]


def _at(table: Tensor, index: Tensor) -> Tensor:
    """table[index] for a flat table, several times faster than indexing."""
    return table.index_select(0, index.reshape(-1)).view(index.shape)


def _cheapest(rows: list[Tensor]) -> list[Tensor]:
    """rows[path]: [symbols, tiles]. The cheapest len(rows) of all paths x symbols, rising: rows of [tiles]."""
    for i, j in _sorting_network(len(rows)):
        _put_in_order(rows, i, j)
    lists = [list(column) for column in zip(*(row.unbind(0) for row in rows), strict=True)]
    kept = lists[0]
    for other in lists[1:]:
        # Of two rising lists, the cheaper of first and last, second and last but one, ... are the cheapest; then sorted again.
        kept = [torch.minimum(a, b) for a, b in zip(kept, reversed(other), strict=True)]
        half = len(kept) // 2
        while half:
            for i in range(len(kept)):
                if not i & half:
                    _put_in_order(kept, i, i + half)
            half //= 2
    return kept


def _put_in_order(rows: list[Tensor], i: int, j: int) -> None:
    rows[i], rows[j] = torch.minimum(rows[i], rows[j]), torch.maximum(rows[i], rows[j])


@functools.cache
def _sorting_network(size: int) -> tuple[tuple[int, int], ...]:
    """Batcher's odd-even merge sort for a power of two: pairs (i, j), i < j, the smaller to go to i."""
    pairs: list[tuple[int, int]] = []
    p = 1
    while p < size:
        k = p
        while k:
            for j in range(k % p, size - k, 2 * k):
                pairs += [(i + j, i + j + k) for i in range(k) if (i + j) // (2 * p) == (i + j + k) // (2 * p)]
            k //= 2
        p *= 2
    return tuple(pairs)
