"""Detokenizer: whole characters only, and pieces that join to the full text, whatever the tokens and however they come."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.replicas.detokenizer import Detokenizer
from espalier.replicas.tokenizer import Tokenizer
from tests.support.tokenizers import TEXTS, write_byte_fallback, write_byte_level


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_byte_fallback(tmp_path_factory.mktemp("byte_fallback")))


def pieces(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def by_definition(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(tokenizer.token_bytes(i) for i in ids if not tokenizer.is_special(i)).decode(errors="replace")


@pytest.mark.parametrize("text", TEXTS)
def test_no_half_characters_on_the_way(byte_level: Tokenizer, byte_fallback: Tokenizer, text: str) -> None:
    for tokenizer in (byte_level, byte_fallback):
        ids = tokenizer.encode(text.replace("\ufffd", "").replace("▁", ""), add_special_tokens=False)
        assert "\ufffd" not in "".join(pieces(tokenizer, ids))


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text(byte_level: Tokenizer, text: str) -> None:
    assert "".join(pieces(byte_level, byte_level.encode(text, add_special_tokens=False))) == text


def test_a_characters_bytes_come_out_with_its_last_one(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("\U00013080", add_special_tokens=False)
    assert len(ids) == 4
    assert pieces(byte_level, ids) == ["", "", "", "\U00013080", ""]
    assert pieces(byte_level, ids[:3]) == ["", "", "", "\ufffd"]


def test_a_reply_keeps_its_leading_space(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode("dog", add_special_tokens=False)
    assert byte_fallback.decode(ids) == "dog"
    assert "".join(pieces(byte_fallback, ids)) == " dog"


def test_special_tokens_are_no_text_unless_asked(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|im_end|>b<tool call>", add_special_tokens=False)
    assert "".join(pieces(byte_level, ids)) == "ab<tool call>"
    assert "".join(pieces(byte_level, ids, skip_special_tokens=False)) == "a<|im_end|>b<tool call>"


def test_special_tokens_do_not_cut_characters(byte_level: Tokenizer) -> None:
    first, second = byte_level.encode("Ω", add_special_tokens=False)
    assert pieces(byte_level, [first, 2, second]) == ["", "", "Ω", ""]


@settings(deadline=None)
@given(data=st.data())
def test_any_tokens_byte_level(byte_level: Tokenizer, data: st.DataObject) -> None:
    # Ids 3..258 are the single bytes: mostly those, so that broken and whole characters both come up.
    ids = data.draw(st.lists(st.integers(3, 258) | st.integers(0, 410), max_size=60))
    text = "".join(pieces(byte_level, ids))
    assert text == by_definition(byte_level, ids)
    assert text == byte_level.decode(ids, skip_special_tokens=True)


@settings(deadline=None)
@given(data=st.data())
def test_any_tokens_byte_fallback(byte_fallback: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(3, 258) | st.integers(0, 400), max_size=60))
    assert "".join(pieces(byte_fallback, ids)) == by_definition(byte_fallback, ids)


@settings(deadline=None)
@given(text=st.text(max_size=40))
def test_any_text(byte_level: Tokenizer, byte_fallback: Tokenizer, text: str) -> None:
    assert "".join(pieces(byte_level, byte_level.encode(text, add_special_tokens=False))) == text
    ids = byte_fallback.encode(text, add_special_tokens=False)
    # Both ways of decoding agree on text, but for the first space.
    joined = "".join(pieces(byte_fallback, ids))
    assert joined.removeprefix(" ") == byte_fallback.decode(ids, skip_special_tokens=True)


@settings(deadline=None)
@given(data=st.data())
def test_it_restarts_from_ids(byte_level: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(3, 258), max_size=30))
    cut = data.draw(st.integers(0, len(ids)))
    again = Detokenizer(byte_level)
    for token_id in ids[:cut]:
        again.push(token_id)
    rest = [again.push(token_id) for token_id in ids[cut:]]
    whole = pieces(byte_level, ids)
    assert [*rest, again.flush()] == whole[cut:]
