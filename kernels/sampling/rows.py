"""Parameters of sampled rows as words in one int32 table, a line a lane, checked and packed on the host. Knows no request and no kernel.

A lane is one live sequence. Its line is written once, when the sequence begins; rows of a round name their lane, so several rows may share
a line, and a round needs no parameters from the host. Everything a row's draw depends on is in its line, its lane's history (`history.py`),
its position and its logits.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels.sampling.reference import MIN_TEMPERATURE, SHARE_BITS, WEIGHT_BITS

MAX_VOCAB = 1 << 18  # sums of so many weights, and of their shares, stay within int64
MAX_TOP = 20  # alternatives reported beside a chosen token
# Up to so many leading tokens are looked for among the groups of the largest best scores, in one program.
SHORT_TOP_K = 256
ALWAYS = 2**31 - 1


class Kind(enum.IntEnum):
    """What a row has to do. PLAIN: draw from all tokens but those of too little weight. SHORT: from few leading ones. LONG: from any prefix."""

    GREEDY = 0
    PLAIN = 1
    SHORT = 2
    LONG = 3


class Word(enum.IntEnum):
    """Columns of the table. Floating-point numbers are there as the bits of fp32, the seed as two words; lists follow at HEADER."""

    KIND = 0
    TEMPERATURE = 1
    TOP_K = 2  # 0: off
    SHARE = 3  # top_p in units of 2^-30; 0: off
    MIN_WEIGHT = 4  # least weight that min_p allows, fp32; 0: off
    EDITED = 5  # whether penalties, biases or bans change the logits
    PENALIZED = 6
    REPETITION = 7
    PRESENCE = 8
    FREQUENCY = 9
    NUM_BIASES = 10
    NUM_BANNED = 11
    BANNED_BEFORE = 12
    NUM_TOP = 13  # -1: no log probabilities
    SEED_LOW = 14
    SEED_HIGH = 15
    HEADER = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How one lane's tokens are drawn; the meaning of the numbers is `reference.py`'s. Temperature 0 is greedy.

    banned: ids that cannot be drawn at positions below `banned_before` (ends of a reply that is too short yet); ids beyond the vocabulary
    are no matter. num_top: None, or how many alternatives to report with log probabilities.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    biases: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()
    banned_before: int = ALWAYS
    num_top: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that a table is made for: tokens of the model, and entries of the longest list of biases and of bans."""

    vocab: int
    max_biases: int = 0
    max_banned: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.vocab <= MAX_VOCAB:
            raise ValueError(f"vocab: {self.vocab} is not between 1 and {MAX_VOCAB}")

    @property
    def width(self) -> int:
        """Words in a line."""
        return Word.HEADER + 2 * self.max_biases + self.max_banned


@dataclass(frozen=True, slots=True)
class Needs:
    """Passes that some row wants. A launch without a pass must have no row that wants it; with it, other rows lose only time."""

    sifts: bool = True
    guesses: bool = True
    logprobs: bool = True

    @staticmethod
    def of(rows: Sequence[Row], limits: Limits) -> "Needs":
        """What these rows want."""
        kinds = {_kind(row, limits.vocab) for row in rows}
        return Needs(
            sifts=bool(kinds & {Kind.PLAIN, Kind.LONG}),
            guesses=Kind.LONG in kinds,
            logprobs=any(row.num_top is not None for row in rows),
        )


def pack_rows(rows: Sequence[Row], limits: Limits) -> Tensor:
    """Lines of the table: int32 [len(rows), limits.width] on the CPU, for one copy to the device.

    Raises ValueError, naming the field, for numbers without a meaning and for lists that are too long.
    """
    lines = torch.zeros(len(rows), limits.width, dtype=torch.int32)
    for line, row in zip(lines, rows, strict=True):
        _check(row, limits)
        biases = row.biases
        banned = tuple(token_id for token_id in row.banned if token_id < limits.vocab)
        penalized = row.repetition != 1.0 or row.presence != 0.0 or row.frequency != 0.0
        header = {
            Word.KIND: _kind(row, limits.vocab),
            Word.TEMPERATURE: _bits(max(row.temperature, MIN_TEMPERATURE)),
            Word.TOP_K: row.top_k if row.top_k < limits.vocab else 0,
            Word.SHARE: max(1, round(row.top_p * 2**SHARE_BITS)) if row.top_p < 1.0 else 0,
            Word.MIN_WEIGHT: _bits_from_above(math.ceil(row.min_p * 2.0**WEIGHT_BITS)),
            Word.EDITED: int(penalized or bool(biases) or bool(banned)),
            Word.PENALIZED: int(penalized),
            Word.REPETITION: _bits(row.repetition),
            Word.PRESENCE: _bits(row.presence),
            Word.FREQUENCY: _bits(row.frequency),
            Word.NUM_BIASES: len(biases),
            Word.NUM_BANNED: len(banned),
            Word.BANNED_BEFORE: row.banned_before,
            Word.NUM_TOP: -1 if row.num_top is None else row.num_top,
            Word.SEED_LOW: _signed(row.seed & 0xFFFFFFFF),
            Word.SEED_HIGH: _signed(row.seed >> 32),
        }
        line[: Word.HEADER] = torch.tensor([header[Word(i)] for i in range(Word.HEADER)], dtype=torch.int32)
        ids, values, bans = line[Word.HEADER :].split([limits.max_biases, limits.max_biases, limits.max_banned])
        ids[: len(biases)] = torch.tensor([token_id for token_id, _ in biases], dtype=torch.int32)
        values[: len(biases)] = torch.tensor([bias for _, bias in biases], dtype=torch.float32).view(torch.int32)
        bans[: len(banned)] = torch.tensor(banned, dtype=torch.int32)
    return lines


def _kind(row: Row, vocab: int) -> Kind:
    if row.temperature == 0.0:
        return Kind.GREEDY
    if 0 < row.top_k <= SHORT_TOP_K and row.top_k < vocab:
        return Kind.SHORT
    return Kind.LONG if 0 < row.top_k < vocab or row.top_p < 1.0 else Kind.PLAIN


def _check(row: Row, limits: Limits) -> None:
    def require(ok: bool, field: str, message: str) -> None:
        if not ok:
            raise ValueError(f"{field}: {message}")

    for field in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency"):
        require(math.isfinite(getattr(row, field)), field, "must be a finite number")
    require(row.temperature >= 0.0, "temperature", "must not be negative")
    require(0 <= row.top_k < 2**31, "top_k", "must be 0 (off) or a positive number of tokens")
    require(0.0 < row.top_p <= 1.0, "top_p", "must lie in (0, 1]")
    require(0.0 <= row.min_p <= 1.0, "min_p", "must lie in [0, 1]")
    require(row.repetition > 0.0, "repetition", "must be positive")
    require(len(row.biases) <= limits.max_biases, "biases", f"at most {limits.max_biases} tokens")
    require(len({token_id for token_id, _ in row.biases}) == len(row.biases), "biases", "each token at most once")
    for token_id, bias in row.biases:
        require(0 <= token_id < limits.vocab, "biases", f"the model has no token {token_id}")
        require(math.isfinite(bias), "biases", "must be finite numbers")
    require(len(row.banned) <= limits.max_banned, "banned", f"at most {limits.max_banned} tokens")
    require(all(token_id >= 0 for token_id in row.banned), "banned", "token ids are not negative")
    require(0 <= row.banned_before < 2**31, "banned_before", "must be a position")
    require(row.num_top is None or 0 <= row.num_top <= MAX_TOP, "num_top", f"must lie in [0, {MAX_TOP}]")
    require(0 <= row.seed < 2**64, "seed", "must fit in 64 bits, unsigned")


def _bits(x: float) -> int:
    """The bits of x rounded to fp32, as an int32."""
    return int(torch.tensor(x, dtype=torch.float32).view(torch.int32))


def _bits_from_above(x: int) -> int:
    """The bits of the smallest fp32 number that is at least x, 0 <= x <= 2^40: an fp32 weight reaches one where it reaches the other."""
    nearest = torch.tensor(float(x), dtype=torch.float32)
    return int(nearest.view(torch.int32)) + int(float(nearest) < x)


def _signed(word: int) -> int:
    """An unsigned 32-bit word as an int32."""
    return word - 2**32 if word >= 2**31 else word
