"""The split rule: how the sum over a linear's inputs is cut into partial sums. A function of the whole layer's input width alone.

Every form of the linear, at every row count, forms these partial sums (each one chain of fp32 accumulations in steps of 16 inputs, in
order, from zero) and adds them left to right. So the rule is part of the arithmetic that replicas name, and may never depend on output
width, rows, device or shards. Prices of the choice: benchmarks/notes/exl3-linear-split-rule.md.
"""

BORDER = 128  # splits begin at multiples of the rotation's width
SPLIT_INPUTS = 512  # one split for so many inputs, ...
MAX_SPLITS = 8  # ... up to so many

ARITHMETIC = "exl3-k16-s8x512-v1"


def num_splits(in_features: int) -> int:
    """in_features: padded input width, a multiple of 128."""
    assert in_features > 0 and in_features % BORDER == 0
    return min(MAX_SPLITS, -(-in_features // SPLIT_INPUTS))


def split_borders(in_features: int) -> tuple[int, ...]:
    """First input of each split, then in_features: num_splits + 1 numbers. Split s begins at block (s * blocks) // num_splits of 128."""
    splits, blocks = num_splits(in_features), in_features // BORDER
    return tuple(split * blocks // splits * BORDER for split in range(splits + 1))
