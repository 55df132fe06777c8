"""What a loaded shard says about itself: the numbers the scheduler plans with and the ids that name its arithmetic. Knows no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """Facts fixed at load, equal on all shards of a replica.

    num_blocks: KV blocks, ids 0 .. num_blocks - 1. block_size: tokens a block holds. max_context: tokens of prompt and reply together, resolved.
    num_host_slots: blocks that fit in the host tier; 0 where there is none.
    vocab_size: ids the head can produce. eos_token_ids: the model's own end tokens.
    weights_id, numerics_id: equal ids mean equal weights and equal arithmetic, so equal tokens. quantization: for people, such as "exl3 4.0bpw".
    round_ms: (rows, milliseconds) of mixed rounds as measured at load, one for each size that rounds are padded to, ascending; () where rounds are
    not padded and nothing was measured.
    """

    num_blocks: int
    block_size: int
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    weights_id: str
    numerics_id: str
    quantization: str
    num_host_slots: int = 0
    round_ms: tuple[tuple[int, float], ...] = ()
