"""Tokenizer: ids and decoded text against transformers, bytes of single tokens, and what is refused."""

import json
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from espalier.replicas.errors import CheckpointError, InvalidRequestError
from espalier.replicas.token_pieces import piece_decoder
from espalier.replicas.tokenizer import Tokenizer
from tests.support.tokenizers import CHATML, TEXTS, write_byte_fallback, write_byte_level

FAMILIES = {"byte level": write_byte_level, "byte fallback": write_byte_fallback}
# The mark for a space cannot be told from a space in the second family.
PLAIN_TEXTS = [text for text in TEXTS if "▁" not in text]


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return FAMILIES[request.param](tmp_path)


@pytest.fixture
def byte_level(tmp_path: Path) -> Path:
    return write_byte_level(tmp_path)


def load_theirs(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def assert_equal_to_transformers(folder: Path) -> None:
    ours, theirs = Tokenizer.from_folder(folder), load_theirs(folder)
    texts = [*TEXTS, *(f"<|im_start|>user\n{text}<|im_end|></s> <tool call>x" for text in TEXTS), "", " ", "\n"]
    for text in texts:
        for add in (False, True):
            ids = ours.encode(text, add_special_tokens=add)
            assert ids == theirs.encode(text, add_special_tokens=add), text
            for skip in (False, True):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id) == (
        theirs.bos_token_id,
        theirs.eos_token_id,
        theirs.pad_token_id,
    )
    assert [i for i in range(ours.vocab_size) if ours.is_special(i)] == sorted(
        i for i, token in theirs.added_tokens_decoder.items() if token.special
    )


def test_ids_and_text_equal_those_of_transformers(folder: Path) -> None:
    assert_equal_to_transformers(folder)


def test_smollm2_equals_transformers(shared: Path) -> None:
    assert_equal_to_transformers(shared / "models" / "smollm2-135m-instruct-exl3-4.0bpw")


def test_tokens_that_only_the_config_knows_are_added_as_transformers_adds_them(byte_level: Path) -> None:
    entry = {"content": "<think>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    known = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    decoder = {str(i): {"content": text, **known} for i, text in enumerate(specials)}
    decoder |= {"402": entry | {"special": False}, "401": entry | {"content": "<img>", "special": True}}
    change_config(
        byte_level,
        lambda config: config.update(
            added_tokens_decoder=decoder,
            additional_special_tokens=["<extra>"],
            unk_token={"__type": "AddedToken", "content": "<unk>"},
        ),
    )
    assert_equal_to_transformers(byte_level)
    tokenizer = Tokenizer.from_folder(byte_level)
    ids = tokenizer.encode("<img><think><extra><unk>", add_special_tokens=False)
    assert len(ids) == 4
    assert [tokenizer.is_special(i) for i in ids] == [True, False, True, True]


def test_special_tokens_map_is_read_where_the_config_has_no_tokens(byte_level: Path) -> None:
    change_config(byte_level, lambda config: [config.pop(key) for key in ("bos_token", "eos_token", "pad_token")])
    (byte_level / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    tokenizer = Tokenizer.from_folder(byte_level)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, 2)


def test_truncation_and_padding_of_the_file_are_not_ours(byte_level: Path) -> None:
    path = byte_level / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    path.write_text(json.dumps(content))
    tokenizer = Tokenizer.from_folder(byte_level)
    assert tokenizer.decode(tokenizer.encode(TEXTS[0], add_special_tokens=False)) == TEXTS[0]


def test_bytes_of_tokens_joined_are_the_text(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    implied_space = tokenizer.token_bytes(tokenizer.encode("a", add_special_tokens=False)[0]).startswith(b" ")
    for text in PLAIN_TEXTS:
        joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_special_tokens=False)))
        assert joined.decode() == (" " + text if implied_space else text)


def test_single_tokens(byte_level: Path) -> None:
    tokenizer = Tokenizer.from_folder(byte_level)
    first, second = tokenizer.encode("Ω", add_special_tokens=False)
    assert tokenizer.token_bytes(first) + tokenizer.token_bytes(second) == "Ω".encode()
    assert tokenizer.token_text(first) == "\ufffd"
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.token_text(tokenizer.encode("<tool call>", add_special_tokens=False)[0]) == "<tool call>"


def test_ids_that_the_tokenizer_lacks_have_no_text(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    for token_id in (-1, tokenizer.vocab_size, 10**6, 2**40):
        assert tokenizer.token_bytes(token_id) == b""
        assert not tokenizer.is_special(token_id)
        assert tokenizer.decode([token_id]) == ""


def test_half_a_surrogate_pair_is_refused(byte_level: Path) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Tokenizer.from_folder(byte_level).encode("a\ud800b", add_special_tokens=False)
    assert caught.value.param == "prompt"


def test_threads_see_the_same(byte_level: Path) -> None:
    tokenizer = Tokenizer.from_folder(byte_level)

    def everything(_: int) -> tuple[list[list[int]], list[bytes], str]:
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
        prompt = tokenizer.render_chat([{"role": "user", "content": TEXTS[5]}])
        return ids, [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)], prompt

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(everything, range(16)))
    assert all(result == results[0] for result in results)


def test_it_pickles_without_its_folder(byte_level: Path) -> None:
    tokenizer = Tokenizer.from_folder(byte_level)
    data = pickle.dumps(tokenizer)
    for path in byte_level.iterdir():
        path.unlink()
    again = pickle.loads(data)
    messages = [{"role": "user", "content": "hello"}]
    assert again.render_chat(messages) == tokenizer.render_chat(messages)
    assert again.encode(TEXTS[0], add_special_tokens=True) == tokenizer.encode(TEXTS[0], add_special_tokens=True)
    assert again.sha256 == tokenizer.sha256


def test_the_hash_tells_tokenizers_apart(tmp_path: Path) -> None:
    first = Tokenizer.from_folder(write_byte_level(tmp_path / "a"))
    same = Tokenizer.from_folder(write_byte_level(tmp_path / "b"))
    other_vocab = Tokenizer.from_folder(write_byte_level(tmp_path / "c", vocab_size=390))
    other_template = Tokenizer.from_folder(write_byte_level(tmp_path / "d", chat_template="{{ messages }}"))
    assert first.sha256 == same.sha256
    assert len({first.sha256, other_vocab.sha256, other_template.sha256}) == 3


# Chat templates of a folder


def rendered(folder: Path, **kwargs: Any) -> str:
    return Tokenizer.from_folder(folder).render_chat([{"role": "user", "content": "x"}], **kwargs)


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = write_byte_level(tmp_path, chat_template=named)
    assert rendered(folder) == "plain"
    assert rendered(folder, tools=[{"type": "function"}]) == "tools"


def test_template_files_win_over_the_config(byte_level: Path) -> None:
    (byte_level / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert rendered(byte_level).startswith("<|im_start|>user")
    (byte_level / "chat_template.jinja").write_text("file")
    assert rendered(byte_level) == "file"
    (byte_level / "chat_templates").mkdir()
    (byte_level / "chat_templates" / "tool_use.jinja").write_text("tools")
    assert rendered(byte_level) == "file"
    assert rendered(byte_level, tools=[]) == "tools"


def test_template_json_is_the_last_resort(tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path, chat_template=None)
    with pytest.raises(InvalidRequestError, match="no chat template"):
        rendered(folder)
    assert not Tokenizer.from_folder(folder).has_chat_template
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert rendered(folder) == "json"


def test_generation_prompt_is_asked_for(tmp_path: Path) -> None:
    folder = write_byte_level(tmp_path, chat_template=CHATML)
    assert rendered(folder).endswith("<|im_start|>assistant\n")
    assert rendered(folder, add_generation_prompt=False).endswith("<|im_end|>\n")


# What is no tokenizer


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "no such file"),
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json"),
        ("tokenizer_config.json", "{", "tokenizer_config.json"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "added_tokens_decoder"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1": 7}}', "added_tokens_decoder"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "chat_template"),
        ("tokenizer_config.json", '{"chat_template": 7}', "chat_template"),
        ("chat_template.jinja", "{% if %}", "chat template"),
    ],
)
def test_broken_files_are_named(byte_level: Path, name: str, content: str | None, message: str) -> None:
    if content is None:
        (byte_level / name).unlink()
    else:
        (byte_level / name).write_text(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.from_folder(byte_level)
    assert str(byte_level) in caught.value.message


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Replace", "pattern": {"String": "a"}}]},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""},
    ],
)
def test_decoders_of_other_families_are_refused(decoder: dict[str, Any] | None) -> None:
    with pytest.raises(ValueError, match="decoder"):
        piece_decoder(decoder)


def test_pieces_of_metaspace() -> None:
    decode = piece_decoder({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True})
    assert decode("▁hello▁") == b" hello "
    assert decode("<0x41>") == b"<0x41>"
