"""Router: which replica a request should go to. Pure: no Ray, no clock of its own, the same answer for the same history."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from espalier.cluster.config import RouterConfig
from espalier.cluster.prefix_index import PrefixIndex, hash_chain

MAX_SESSIONS = 65536

RouteKind = Literal["prefix", "session", "load"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may be chosen. outstanding_tokens: what it still has to compute, by its last report and what was sent to it since."""

    replica: str
    outstanding_tokens: int


@dataclass(frozen=True, slots=True)
class Ranking:
    """Replicas from the first choice to the last, and what made the first one first."""

    replicas: tuple[str, ...]
    kind: RouteKind


class Router:
    """Ranks the replicas of one model.

    A replica's cost is its outstanding tokens less the tokens of the prompt that it is thought to hold; the least cost comes first, ties go by
    replica id. The session's own replica comes before all. Neither a held prefix nor a session counts on a replica that has more than
    `affinity_max_excess` outstanding tokens above the least loaded one, and a prefix shorter than `affinity_min_tokens` never does.
    """

    def __init__(self, config: RouterConfig, block_size: int) -> None:
        self._config = config
        self._block_size = block_size
        self._index = PrefixIndex(config.prefix_entries)
        # Session -> (replica, time of its last request), the longest unused first.
        self._sessions: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def rank(
        self, token_ids: Sequence[int], session: str | None, candidates: Sequence[Candidate], now: float
    ) -> Ranking:
        """All candidates, the best first. now: seconds on any clock that `record` is given too."""
        assert candidates
        chain = hash_chain(token_ids, self._block_size)
        least = min(candidate.outstanding_tokens for candidate in candidates)
        home = self._home(session, now)

        def order(candidate: Candidate) -> tuple[bool, int, str]:
            attracts = candidate.outstanding_tokens - least <= self._config.affinity_max_excess
            held = self._held_tokens(candidate.replica, chain) if attracts else 0
            away = not (attracts and candidate.replica == home)
            return away, candidate.outstanding_tokens - held, candidate.replica

        first, *others = sorted(candidates, key=order)
        kind: RouteKind = "load"
        if not order(first)[0]:
            kind = "session"
        elif order(first)[1] < first.outstanding_tokens:
            kind = "prefix"
        return Ranking((first.replica, *(candidate.replica for candidate in others)), kind)

    def record(self, replica: str, token_ids: Sequence[int], session: str | None, now: float) -> None:
        """The replica was given these tokens, a prompt or a prompt with its reply; it will hold them for a while."""
        self._index.record(replica, hash_chain(token_ids, self._block_size))
        if session is not None:
            self._sessions[session] = (replica, now)
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)

    def forget(self, replica: str) -> None:
        """The replica is gone, and with it what it held. Its sessions find a new home by themselves."""
        self._index.forget(replica)

    def _home(self, session: str | None, now: float) -> str | None:
        if session is None or session not in self._sessions:
            return None
        replica, used = self._sessions[session]
        if now - used > self._config.session_ttl_s:
            del self._sessions[session]
            return None
        return replica

    def _held_tokens(self, replica: str, chain: Sequence[int]) -> int:
        held = self._index.held_blocks(replica, chain) * self._block_size
        return held if held >= self._config.affinity_min_tokens else 0
