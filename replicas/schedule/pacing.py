"""How many rows of prompts one round takes. Pure: chunk sizes move no bits, so all there is to choose is who waits how long.

Knows rounds by what they took when they were measured (`ShardInfo.round_ms`); where nothing was, only the round's size is a bound.
"""

from collections.abc import Sequence

# So many rows of prompts are in every round that has room for them, whatever the bound: prompts always get on.
MIN_PROMPT_ROWS = 16
# Ends of chunks lie on multiples of this where they can: kernels read queries and keys in tiles of so many positions.
CHUNK_ALIGNMENT = 16

RoundTimes = Sequence[tuple[int, float]]


def prompt_limit(
    max_rows: int, num_decoding_rows: int, *, decode_waits: bool, round_ms: RoundTimes, decode_gap_ms: float
) -> int:
    """Rows of prompts that a round may take beside `num_decoding_rows`, of `max_rows` in all.

    decode_waits: decoding lanes wait for this round, or are slowed by it. Then it is to take no longer than decode_gap_ms, as measured.
    """
    limit = max_rows - num_decoding_rows
    if not (decode_waits and round_ms):
        return limit
    bound = max((rows for rows, took_ms in round_ms if took_ms <= decode_gap_ms), default=0)
    return min(limit, max(bound - num_decoding_rows, MIN_PROMPT_ROWS))


def fitted_rows(num_prompt_rows: int, num_decoding_rows: int, round_ms: RoundTimes) -> int:
    """How many of these prompt rows to run now: all, or as many as fill a size that rounds are padded to, where that and a round for the rest
    take less time than the next larger size."""
    wanted = num_decoding_rows + num_prompt_rows
    filled = max((rows for rows, _ in round_ms if rows <= wanted), default=0)
    if filled - num_decoding_rows < MIN_PROMPT_ROWS or filled == wanted:
        return num_prompt_rows
    apart_ms = _round_ms(filled, round_ms) + _round_ms(wanted - filled, round_ms)
    return filled - num_decoding_rows if apart_ms < _round_ms(wanted, round_ms) else num_prompt_rows


def _round_ms(num_rows: int, round_ms: RoundTimes) -> float:
    """What a round of so many rows takes, padded as it is."""
    return next((took_ms for rows, took_ms in round_ms if rows >= num_rows), round_ms[-1][1])


def chunk_rows(start: int, num_wanted: int, num_left: int, *, is_first: bool) -> int:
    """Rows of the prompt chunk that begins at position `start`: all that are wanted, or as many as the round has left, ended on a multiple of
    CHUNK_ALIGNMENT. Where none would remain, only the first prompt of a round takes what there is."""
    if num_wanted <= num_left:
        return num_wanted
    aligned = (start + num_left) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT - start
    return aligned if aligned > 0 else num_left * is_first
