"""Which replica was sent which prefix: what the router knows of the engines' prefix caches. A guess, never a promise; knows no Ray."""

from collections import OrderedDict
from collections.abc import Sequence


def hash_chain(token_ids: Sequence[int], block_size: int) -> tuple[int, ...]:
    """One hash per full block, each over the block and all before it.

    Equal prefixes have equal chains in every process (hashes of integers are not salted). Two different prefixes may collide; that sends a
    request to a replica that must compute its prompt, nothing worse.
    """
    chain = []
    above = 0
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        above = hash((above, *token_ids[start : start + block_size]))
        chain.append(above)
    return tuple(chain)


class PrefixIndex:
    """Per replica the block hashes last sent to it, at most `entries` of them; the longest unused go first."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._held: dict[str, OrderedDict[int, None]] = {}

    def held_blocks(self, replica: str, chain: Sequence[int]) -> int:
        """How many leading blocks of the chain the replica was sent and has not forgotten. Does not count as a use."""
        held = self._held.get(replica)
        if held is None:
            return 0
        for count, block in enumerate(chain):
            if block not in held:
                return count
        return len(chain)

    def record(self, replica: str, chain: Sequence[int]) -> None:
        """The replica is sent this chain. Its head counts as used last, as a prefix is worth nothing without its head."""
        held = self._held.setdefault(replica, OrderedDict())
        for block in reversed(chain):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self._entries:
            held.popitem(last=False)

    def forget(self, replica: str) -> None:
        """The replica is gone."""
        self._held.pop(replica, None)
