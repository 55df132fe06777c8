"""What the engine tells its owner after each round: the events of all requests, and how loaded it is. Plain data that pickles."""

from dataclasses import dataclass

from espalier.replicas.request import TokenEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How loaded one engine is, as of round `round_id`.

    running: requests that hold a lane. waiting: requests in the queue. outstanding_tokens: prompt tokens not computed yet plus tokens that may
    still be generated, the latter capped per request because most replies end before max_tokens.
    free_blocks: KV blocks that can be had without preempting anyone, cached ones included.
    draining: takes no new requests.
    """

    running: int
    waiting: int
    outstanding_tokens: int
    free_blocks: int
    total_blocks: int
    round_id: int
    draining: bool


@dataclass(frozen=True, slots=True)
class RoundReport:
    """One message a round, also of rounds without events; one more when requests end between rounds (abort, deadline, stop)."""

    events: tuple[TokenEvent, ...]
    load: Load
