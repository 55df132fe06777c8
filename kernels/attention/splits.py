"""How attention on a GPU walks over keys: tiles and splits at absolute positions. Knows neither rows nor blocks.

Keys are taken in *tiles* of 128. The tiles of a *split* of 256 keys form one online softmax, begun from nothing; splits are merged left to
right. Both borders are multiples of absolute positions, so what a row sums, and in which order, depends on its own position alone: never on
the chunk it came in, on how many programs share its splits, or on the rows beside it. A tile or split of which a row sees no key changes no
bit of that row, so a form may skip it or not. Prices of the choice: benchmarks/notes/attention.md.
"""

TILE_KEYS = 128
SPLIT_KEYS = 256

ARITHMETIC = "attention-t128-s256-v1"

EVERY_KEY = 1 << 30  # a window that no context fills


def most_splits(max_context: int, max_rows: int, window: int | None) -> int:
    """Splits that a run of at most max_rows neighbouring rows can see, in a context of at most max_context positions."""
    assert max_context > 0 and max_rows > 0
    whole = -(-max_context // SPLIT_KEYS)
    if window is None:
        return whole
    # They see window + max_rows - 1 neighbouring keys, which may begin anywhere in a split.
    return min(whole, (window + max_rows - 3) // SPLIT_KEYS + 2)
