"""The hash that every reply carries, so that anyone can check that two replies are the same tokens."""

import hashlib
import struct
from collections.abc import Sequence


def token_sha256(token_ids: Sequence[int]) -> str:
    """Hex SHA-256 over the generated token ids as little-endian uint32, stop tokens and tokens trimmed by a stop string included."""
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).hexdigest()
