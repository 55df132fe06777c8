"""StopMatcher and the end tokens: against a plain search over the whole text, for every way of cutting it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.replicas.request import SamplingParams
from espalier.replicas.sampling.stops import StopMatcher, banned_token_ids, end_token_ids


def feed(stops: list[str], chunks: list[str]) -> tuple[str, str | None]:
    """(all text shown, the match), the end of the text included."""
    matcher = StopMatcher(stops)
    shown = ""
    for chunk in chunks:
        text, stop = matcher.push(chunk)
        shown += text
        if stop is not None:
            assert matcher.flush() == ""
            return shown, stop
    return shown + matcher.flush(), None


def first_complete(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: the stop string complete first, the longest of those complete at the same character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("stops", "chunks", "shown"),
    [
        (["###"], ["ab", "#", "#", "#", "c"], ["ab", "", "", ""]),
        (["###"], ["a#", "#b"], ["a", "##b"]),
        (["abab"], ["ab", "a", "c"], ["", "", "abac"]),
        (["\n\n"], ["x\n", "y\n\nz"], ["x", "\ny"]),
        ([], ["a", "b"], ["a", "b"]),
    ],
)
def test_text_that_may_begin_a_stop_waits(stops: list[str], chunks: list[str], shown: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert [matcher.push(chunk)[0] for chunk in chunks[: len(shown)]] == shown


def test_the_match_complete_first_wins_then_the_longest() -> None:
    assert feed(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert feed(["c", "bc", "abc"], ["xabc"]) == ("x", "abc")
    assert feed(["abc", "b"], ["aab"]) == ("aa", "b")


def test_a_stop_that_does_not_count_is_ordinary_text() -> None:
    matcher = StopMatcher(["end", "ending"])
    assert matcher.push("the end", armed=False) == ("the ", None)
    assert matcher.push(".", armed=False) == ("end.", None)
    assert matcher.push("end", armed=False) == ("", None)
    assert matcher.push("ing", armed=True) == ("", "ending")


def test_a_stop_that_does_not_count_is_not_held_back() -> None:
    matcher = StopMatcher(["xend", "end"])
    assert matcher.push("xend", armed=False) == ("xend", None)


def test_a_stop_may_begin_before_it_counts() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push("a st", armed=False) == ("a ", None)
    assert matcher.push("op b", armed=True) == ("", "stop")


@settings(deadline=None)
@given(data=st.data())
def test_any_text_cut_anyhow(data: st.DataObject) -> None:
    stops = data.draw(st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
    chunks = data.draw(st.lists(st.text("ab", max_size=4), max_size=12))
    assert feed(stops, chunks) == first_complete(stops, "".join(chunks))


@settings(deadline=None)
@given(data=st.data())
def test_only_what_may_begin_a_stop_is_held_back(data: st.DataObject) -> None:
    stops = data.draw(st.lists(st.text("ab", min_size=1, max_size=5), max_size=4))
    text = data.draw(st.text("ab", max_size=20))
    shown, stop = StopMatcher(stops).push(text)
    if stop is None:
        held = text[len(shown) :]
        assert text == shown + held
        proper = {s[:n] for s in stops for n in range(len(s))} | {""}
        assert held == max((p for p in proper if text.endswith(p)), key=len)


@settings(deadline=None)
@given(data=st.data())
def test_arming_later_is_a_search_from_there(data: st.DataObject) -> None:
    stops = data.draw(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
    before, after = data.draw(st.text("ab", max_size=8)), data.draw(st.text("ab", max_size=8))
    matcher = StopMatcher(stops)
    shown = matcher.push(before, armed=False)[0]
    text, stop = matcher.push(after, armed=True)
    shown += text
    ends = [
        (end, s)
        for end in range(len(before) + 1, len(before + after) + 1)
        for s in stops
        if (before + after)[:end].endswith(s)
    ]
    if ends:
        end, expected = min(ends, key=lambda found: (found[0], -len(found[1])))
        assert (stop, shown) == (expected, (before + after)[: end - len(expected)])
    else:
        assert stop is None
        assert shown + matcher.flush() == before + after


def test_end_tokens() -> None:
    assert end_token_ids(SamplingParams(stop_token_ids=(7,)), (1, 2)) == {1, 2, 7}
    assert end_token_ids(SamplingParams(stop_token_ids=(7,), ignore_eos=True), (1, 2)) == {7}


def test_end_tokens_are_banned_while_the_reply_would_be_too_short() -> None:
    params = SamplingParams(min_tokens=3, stop_token_ids=(7,))
    assert [banned_token_ids(params, (2, 1), n) for n in range(4)] == [(1, 2, 7), (1, 2, 7), (), ()]
    assert banned_token_ids(SamplingParams(), (1,), 0) == ()
    assert banned_token_ids(SamplingParams(min_tokens=9, ignore_eos=True), (1,), 0) == ()
