"""W3C Trace Context headers: what is taken, and what begins a new trace instead."""

import pytest

from espalier.cluster.trace_context import TraceContext, read_trace_context

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


def test_a_context_tells_its_parts() -> None:
    context = read_trace_context([PARENT], ["a=1"])
    assert context == TraceContext(PARENT, "a=1")
    assert (context.trace_id, context.span_id, context.flags) == (TRACE_ID, SPAN_ID, 1)


@pytest.mark.parametrize(
    ("parent", "read_as"),
    [
        (f"  {PARENT} ", PARENT),
        (f"00-{TRACE_ID}-{SPAN_ID}-00", f"00-{TRACE_ID}-{SPAN_ID}-00"),
        # Later versions may add to what this one says.
        (f"cc-{TRACE_ID}-{SPAN_ID}-01", PARENT),
        (f"cc-{TRACE_ID}-{SPAN_ID}-01-more", PARENT),
    ],
)
def test_what_is_taken(parent: str, read_as: str) -> None:
    assert read_trace_context([parent], []) == TraceContext(read_as)


@pytest.mark.parametrize(
    "parents",
    [
        [],
        [""],
        ["nonsense"],
        [PARENT, PARENT],
        [PARENT.upper()],
        [PARENT + "-more"],
        [PARENT + "0"],
        [f"ff-{TRACE_ID}-{SPAN_ID}-01"],
        [f"cc-{TRACE_ID}-{SPAN_ID}-01more"],
        [f"00-{'0' * 32}-{SPAN_ID}-01"],
        [f"00-{TRACE_ID}-{'0' * 16}-01"],
        [f"00-{TRACE_ID[:-1]}-{SPAN_ID}-01"],
        [f"00-{TRACE_ID}-{SPAN_ID}-1"],
        [f"00-{TRACE_ID[:-1]}\u0663-{SPAN_ID}-01"],
    ],
)
def test_what_is_not(parents: list[str]) -> None:
    assert read_trace_context(parents, ["a=1"]) is None


@pytest.mark.parametrize(
    ("states", "read_as"),
    [
        (["a=1,b=2"], "a=1,b=2"),
        (["a=1 , b=2", "c=3"], "a=1,b=2,c=3"),
        (["", ","], ""),
        (["a=" + "x" * 600], ""),
        ([",".join(f"k{i}=1" for i in range(33))], ""),
        (["a=\u00e9"], ""),
    ],
)
def test_states_are_one_bounded_list(states: list[str], read_as: str) -> None:
    assert read_trace_context([PARENT], states) == TraceContext(PARENT, read_as)
