"""TraceContext: where in a distributed trace a piece of work belongs, as W3C Trace Context headers say it. Plain strings; knows no tracer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
MAX_STATE_LENGTH = 512
MAX_STATE_MEMBERS = 32

_PARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<ids>[0-9a-f]{32}-[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_STATE = re.compile(r"[\x20-\x7e\t]*")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """traceparent: of version 00, well formed. tracestate: what the tracing systems upstream pass on, or nothing."""

    traceparent: str
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits, shared by all spans of the trace."""
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        """16 hexadecimal digits: the span that the work is a part of."""
        return self.traceparent[36:52]

    @property
    def flags(self) -> int:
        """Bit 0: the trace is sampled."""
        return int(self.traceparent[53:55], 16)


def read_trace_context(traceparents: Sequence[str], tracestates: Sequence[str]) -> TraceContext | None:
    """The context in a request's headers of these two names. None when there is none that can be trusted: then a new trace begins."""
    if len(traceparents) != 1 or (found := _PARENT.fullmatch(traceparents[0].strip())) is None:
        return None
    version, ids, flags, more = found["version"], found["ids"], found["flags"], found["more"]
    trace_id, span_id = ids.split("-")
    # A version after 00 may say more; what it says first is the same.
    if version == "ff" or (version == "00" and more is not None) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(f"00-{ids}-{flags}", _state(tracestates))


def _state(tracestates: Sequence[str]) -> str:
    """Several headers are one list. A list that is too long or not text is dropped; the trace goes on without it."""
    members = [member for header in tracestates for part in header.split(",") if (member := part.strip())]
    state = ",".join(members)
    sound = len(state) <= MAX_STATE_LENGTH and len(members) <= MAX_STATE_MEMBERS and _STATE.fullmatch(state)
    return state if sound else ""
