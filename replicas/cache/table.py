"""BlockTable: where each position of a sequence lies in KV storage. Append-only, because steps in flight read what was appended before."""

from collections.abc import Sequence


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold the state of `num_tokens` positions."""
    return -(-num_tokens // block_size)


class BlockTable:
    """Position p lies in block `block_ids[p // block_size]`, at offset `p % block_size`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_ids: list[int] = []

    def append(self, block_ids: Sequence[int]) -> None:
        """Extends the table by these blocks."""
        self.block_ids.extend(block_ids)

    @property
    def num_positions(self) -> int:
        """Positions that have a place."""
        return len(self.block_ids) * self.block_size

    def slot(self, position: int) -> int:
        """The place of a position in storage, counted in tokens: block id x block size + offset."""
        return self.block_ids[position // self.block_size] * self.block_size + position % self.block_size
