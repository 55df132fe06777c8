"""OutputStream: where a choice ends, what of its text is shown, and that the tokens' cuts and a restart leave no trace."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.replicas.output import OutputDelta, OutputStream, StopMatch
from espalier.replicas.request import FinishReason, SamplingParams

EOS = (256, 257)


@dataclass
class ByteText:
    """Token i is byte i; 256 and up are special. Asking for token `broken` raises."""

    broken: int = -1

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == self.broken:
            raise RuntimeError("broken token")
        return bytes([token_id]) if token_id < 256 else b"<special>"

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256


def run(params: SamplingParams, tokens: list[int]) -> tuple[str, StopMatch | None, int]:
    """(the text, the end, tokens taken); flushed if nothing ended it."""
    stream = OutputStream(ByteText(), params, EOS)
    text = ""
    for count, token_id in enumerate(tokens, start=1):
        delta = stream.push(token_id)
        text += delta.text
        if delta.stop is not None:
            assert stream.flush() == ""
            return text, delta.stop, count
    return text + stream.flush(), None, len(tokens)


def many(**kwargs: object) -> SamplingParams:
    return replace(SamplingParams(max_tokens=1000), **kwargs)  # type: ignore[arg-type]


def test_the_models_end_token() -> None:
    assert run(many(), [*b"hi", 257, *b"more"]) == ("hi", StopMatch(257, FinishReason.STOP), 3)


def test_ignored_end_tokens_are_no_text() -> None:
    assert run(many(ignore_eos=True), [*b"hi", 257, *b"more"]) == ("himore", None, 7)


def test_stop_token_ids_end_it_even_where_end_tokens_are_ignored() -> None:
    params = many(ignore_eos=True, stop_token_ids=(ord("r"),))
    assert run(params, [*b"hi", 257, *b"more"]) == ("himo", StopMatch(ord("r"), FinishReason.STOP), 6)


def test_a_stop_string_across_tokens_is_never_shown() -> None:
    assert run(many(stop=("###",)), [*b"ab##c###d"]) == ("ab##c", StopMatch("###", FinishReason.STOP), 8)


def test_what_looked_like_a_stop_string_is_shown_at_any_end() -> None:
    params = many(stop=("###",))
    assert run(params, [*b"ab##", 256]) == ("ab##", StopMatch(256, FinishReason.STOP), 5)
    assert run(replace(params, max_tokens=4), [*b"ab##"]) == ("ab##", StopMatch(None, FinishReason.LENGTH), 4)
    assert run(params, [*b"ab##"]) == ("ab##", None, 4)


def test_max_tokens() -> None:
    assert run(many(max_tokens=3), [*b"abcdef"]) == ("abc", StopMatch(None, FinishReason.LENGTH), 3)


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    assert run(many(max_tokens=3, stop=("c",)), [*b"abc"]) == ("ab", StopMatch("c", FinishReason.STOP), 3)
    assert run(many(max_tokens=3), [*b"ab", 256]) == ("ab", StopMatch(256, FinishReason.STOP), 3)


def test_before_min_tokens_nothing_stops_it() -> None:
    params = many(min_tokens=5, stop=("b",), stop_token_ids=(ord("c"),))
    assert run(params, [*b"abc", 256, *b"xb"]) == ("abcx", StopMatch("b", FinishReason.STOP), 6)
    assert run(params, [*b"abc", 256, 257]) == ("abc", StopMatch(257, FinishReason.STOP), 5)
    assert run(many(min_tokens=5, max_tokens=5), [*b"a", 256, *b"bcd"]) == (
        "abcd",
        StopMatch(None, FinishReason.LENGTH),
        5,
    )


def test_a_character_is_shown_when_it_is_whole() -> None:
    stream = OutputStream(ByteText(), many(), EOS)
    assert [stream.push(byte).text for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]


def test_half_a_character_at_the_end_is_one_replacement() -> None:
    assert run(many(), [*"a😀".encode()[:-1], 256]) == ("a\ufffd", StopMatch(256, FinishReason.STOP), 5)
    assert run(many(max_tokens=2), [*"a😀".encode()]) == ("a\ufffd", StopMatch(None, FinishReason.LENGTH), 2)


def test_a_stop_string_of_several_bytes_a_character() -> None:
    assert run(many(stop=("。",)), [*"はい。いいえ".encode()]) == ("はい", StopMatch("。", FinishReason.STOP), 9)


def test_a_broken_token_changes_nothing() -> None:
    text = ByteText()
    stream = OutputStream(text, many(stop=("bc",)), EOS)
    stream.push(ord("b"))
    text.broken = ord("x")
    with pytest.raises(RuntimeError):
        stream.push(ord("x"))
    assert stream.num_tokens == 1
    assert stream.push(ord("c")) == OutputDelta("", StopMatch("bc", FinishReason.STOP))


def test_no_token_after_the_end() -> None:
    stream = OutputStream(ByteText(), many(), EOS)
    stream.push(256)
    with pytest.raises(AssertionError):
        stream.push(ord("a"))


_TOKENS = st.lists(st.sampled_from([*b"ab#", *"é".encode(), 256, 258]), max_size=20)
_PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(12, 16),
    min_tokens=st.integers(0, 12),
    stop=st.lists(st.text("ab#é", min_size=1, max_size=3), max_size=3).map(tuple),
    stop_token_ids=st.sampled_from([(), (ord("b"),), (258,)]),
    ignore_eos=st.booleans(),
)


@settings(deadline=None)
@given(params=_PARAMS, tokens=_TOKENS)
def test_the_text_is_a_prefix_of_all_text_and_holds_no_stop(params: SamplingParams, tokens: list[int]) -> None:
    text, stop, count = run(params, tokens)
    everything = bytes(t for t in tokens[:count] if t < 256).decode(errors="replace")
    assert everything.startswith(text)
    if stop is None or stop.reason is FinishReason.LENGTH:
        assert text == everything
    if params.min_tokens == 0:
        assert not any(s in text.removesuffix("\ufffd") for s in params.stop)
    if stop is not None:
        assert count >= params.min_tokens


@settings(deadline=None)
@given(params=_PARAMS, tokens=_TOKENS, data=st.data())
def test_a_restart_goes_on_where_the_first_one_stood(
    params: SamplingParams, tokens: list[int], data: st.DataObject
) -> None:
    _, _, count = run(params, tokens)
    cut = data.draw(st.integers(0, max(count - 1, 0)))
    first = OutputStream(ByteText(), params, EOS)
    for token_id in tokens[:cut]:
        first.push(token_id)
    second = OutputStream(ByteText(), params, EOS, emitted=tokens[:cut])
    assert second.num_tokens == cut
    for token_id in tokens[cut:count]:
        assert second.push(token_id) == first.push(token_id)
    assert second.flush() == first.flush()
