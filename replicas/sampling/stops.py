"""Where a reply ends: its end tokens, and its stop strings matched as the text grows. Pure; knows neither tokenizer nor queue."""

from collections import deque
from collections.abc import Sequence

from espalier.replicas.request import SamplingParams


def end_token_ids(params: SamplingParams, eos_token_ids: Sequence[int]) -> frozenset[int]:
    """Ids that end the reply: stop_token_ids, and the model's own end tokens unless they are to be ignored."""
    return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))


def banned_token_ids(params: SamplingParams, eos_token_ids: Sequence[int], num_generated: int) -> tuple[int, ...]:
    """Ids that the next token must not be, `num_generated` tokens into the reply: the end tokens while the reply would be too short."""
    if num_generated + 1 >= params.min_tokens:
        return ()
    return tuple(sorted(end_token_ids(params, eos_token_ids)))


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces; an Aho-Corasick automaton, so the cost is that of the new text.

    The match is the one that is complete first; of those complete at the same character, the longest. That depends on the text alone,
    not on how it was cut. Text that may be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        # Node 0 is the empty prefix; a node's depth is its prefix's length.
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._fallback = [0] * len(self._children)
        self._link()
        self._node = 0
        self._held = ""

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._children[node]:
                self._children[node][char] = len(self._children)
                self._children.append({})
                self._depth.append(self._depth[node] + 1)
                self._match.append(None)
            node = self._children[node][char]
        self._match[node] = stop

    def _link(self) -> None:
        """Fallback of a node: the longest proper suffix of its prefix that is a prefix too. A suffix's match is the node's, if it has none."""
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            if self._match[node] is None:
                self._match[node] = self._match[self._fallback[node]]
            for char, child in self._children[node].items():
                self._fallback[child] = self._next(self._fallback[node], char)
                queue.append(child)

    def _next(self, node: int, char: str) -> int:
        while node and char not in self._children[node]:
            node = self._fallback[node]
        return self._children[node].get(char, 0)

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """(text that can be shown, the stop string found or None). After a match only the text before it is ever shown.

        armed: a stop string that is complete within `text` counts; otherwise it is ordinary text.
        """
        pending = self._held + text
        for index, char in enumerate(text, start=len(self._held)):
            self._node = self._next(self._node, char)
            stop = self._match[self._node]
            if stop is not None and armed:
                self._held, self._node = "", 0
                return pending[: index + 1 - len(stop)], stop
        while self._node and not self._children[self._node]:
            # A whole stop string that did not count, and that no longer one begins with: nothing to wait for.
            self._node = self._fallback[self._node]
        shown = len(pending) - self._depth[self._node]
        self._held = pending[shown:]
        return pending[:shown], None

    def flush(self) -> str:
        """The text held back, when no more will come."""
        held, self._held, self._node = self._held, "", 0
        return held
