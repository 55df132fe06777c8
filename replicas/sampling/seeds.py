"""Seeds as plain integers: the seed of each choice, and the key of each draw. Imports nothing, so the gateway may use it.

The noise of a draw is a pure function of (seed, absolute position, token id). This file folds seed and position into a 64-bit key;
`kernels/sampling/reference.py` folds in the token id, with 32-bit arithmetic only.
"""

_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    """One output of SplitMix64 (Steele, Lea, Flood 2014) from state `x`: a bijection of uint64 whose output bits all depend on all input bits."""
    x = (x + _GAMMA) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a call: the call's own for choice 0, a hash of both for the others."""
    assert 0 <= seed <= _MASK, "a seed is a uint64"
    assert index >= 0, "choices count from 0"
    # Mixed twice, to be far from the row keys of all seeds that people think of.
    return seed if index == 0 else mix64((mix64(mix64(seed)) + index) & _MASK)


def row_key(seed: int, position: int) -> int:
    """The uint64 key of the draw at absolute position `position` (prompt and reply counted together, from 0)."""
    assert 0 <= seed <= _MASK, "a seed is a uint64"
    assert position >= 0, "positions count from 0"
    return mix64((mix64(seed) + position) & _MASK)
