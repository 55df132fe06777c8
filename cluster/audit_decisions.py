"""Which replies are audited, where they are run again, and what that tells: the decisions of the exactness audit. Pure: no clock, no task."""

import enum
import hashlib
from collections.abc import Iterable, Sequence

from espalier.cluster.router import Candidate
from espalier.replicas.request import Finish, FinishReason

# Makes the draw independent of any other use of hashed request ids. It is no secret.
SAMPLING_KEY = b"espalier exactness audit"


class AuditResult(enum.StrEnum):
    """What became of one audit. FAILED: the re-run gave no reply. DROPPED: it found no spare time while the reply was worth it."""

    EQUAL = "equal"
    UNEQUAL = "unequal"
    FAILED = "failed"
    DROPPED = "dropped"


def is_sampled(request_id: str, share: float) -> bool:
    """Whether this request is in the audited share, 0..1. The same answer for the same id, on any machine; a larger share keeps what a
    smaller one has."""
    digest = hashlib.blake2b(request_id.encode(), key=SAMPLING_KEY, digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2.0**64


def is_whole(finish: Finish | None) -> bool:
    """Whether the reply ended by itself. One that was aborted, failed or ran out of time is no whole reply to compare with."""
    return finish is not None and finish.reason in (FinishReason.STOP, FinishReason.LENGTH)


def choose_replica(origin: str, candidates: Iterable[Candidate]) -> str | None:
    """The least loaded of the replicas that did not give the reply; the one that did when there is no other."""
    return min(
        ((candidate.replica == origin, candidate.outstanding_tokens, candidate.replica) for candidate in candidates),
        default=(False, 0, None),
    )[2]


def first_difference(reply: Sequence[int], rerun: Sequence[int]) -> int | None:
    """Index of the first token that differs, or that only one of them has; None when they are equal."""
    for index, (one, other) in enumerate(zip(reply, rerun, strict=False)):
        if one != other:
            return index
    return None if len(reply) == len(rerun) else min(len(reply), len(rerun))
