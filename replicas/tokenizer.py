"""Tokenizer: text <-> token ids of one checkpoint, and its chat template. Ids and prompts equal those of transformers.

Reads tokenizer.json (needed), tokenizer_config.json, special_tokens_map.json and the chat template files. It is made from the texts of these
files alone, so it pickles and can be sent to a process that does not see the folder. Knows no engine.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import AddedToken

from espalier.replicas.chat_template import ChatTemplates
from espalier.replicas.errors import CheckpointError, InvalidRequestError
from espalier.replicas.token_pieces import piece_decoder


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Contents of a checkpoint's tokenizer files. chat_templates: sources by name, "default" the usual one."""

    tokenizer_json: str
    config: Mapping[str, Any] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises CheckpointError naming the file that is missing or broken."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file; a checkpoint needs its tokenizer in this form to be served")
        config = _read_json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:
            # Only older checkpoints leave the special tokens to a file of their own.
            config |= _read_json(folder / "special_tokens_map.json")
        return cls(_read_text(path), config, _chat_templates(folder, config))

    def sha256(self) -> str:
        """Hex SHA-256 over everything that decides ids and prompts."""
        parts = [self.tokenizer_json, dict(self.config), dict(self.chat_templates)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class Tokenizer:
    """One checkpoint's tokenizer; implements espalier.cluster.call.ModelText and espalier.replicas.detokenizer.TextDecoder. Thread-safe.

    special_tokens: texts by name (bos_token, eos_token, ...). bos_token_id, eos_token_id, pad_token_id: None where the checkpoint has none;
    the engine's end tokens come from the model's generation_config.json and may be more. vocab_size: one more than the largest id.
    sha256: of the files' contents. Raises CheckpointError for files that make no tokenizer known here.
    """

    def __init__(self, files: TokenizerFiles) -> None:
        self._files = files
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(files.tokenizer_json)
        except Exception as error:  # the Rust side raises the base class itself
            raise CheckpointError(f"tokenizer.json: {error}") from error
        try:
            self._piece_bytes = piece_decoder(json.loads(files.tokenizer_json).get("decoder"))
        except ValueError as error:
            raise CheckpointError(f"tokenizer.json: {error}") from error
        self.special_tokens = _special_tokens(files.config)
        try:
            _add_missing_tokens(self._tokenizer, files.config, self.special_tokens)
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointError(f"tokenizer_config.json: added_tokens_decoder: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self.pad_token_id = self._id_of("pad_token")
        self._templates = ChatTemplates(files.chat_templates, self.special_tokens)

    @classmethod
    def from_folder(cls, path: Path) -> Self:
        """The tokenizer of the checkpoint in that folder. Raises CheckpointError naming the file at fault."""
        try:
            return cls(TokenizerFiles.read(path))
        except CheckpointError as error:
            if str(path) in error.message:
                raise
            raise CheckpointError(f"{path}: {error.message}") from error

    def __reduce__(self) -> tuple[type[Self], tuple[TokenizerFiles]]:
        return type(self), (self._files,)

    @cached_property
    def sha256(self) -> str:
        return self._files.sha256()

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work at all."""
        return "default" in self._files.chat_templates

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; special tokens spelled out in it become their ids. add_special_tokens: add those that the checkpoint puts around one.

        Raises InvalidRequestError for a text that is not Unicode (it holds half of a surrogate pair).
        """
        try:
            # The batch's form lets go of the interpreter's lock; a long text would stop every other thread.
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:  # what the Rust side makes of a str that has no UTF-8
            raise InvalidRequestError(
                "prompt: it holds half of a surrogate pair, which is not text", param="prompt"
            ) from error
        return encoding.ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids that begin a text, as transformers decodes it; ids that the tokenizer lacks have none.

        A reply's text, which goes on after a prompt, is `espalier.replicas.detokenizer`'s.
        """
        known = [token_id for token_id in token_ids if 0 <= token_id < self.vocab_size]
        [text] = self._tokenizer.decode_batch([known], skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for inside a text; maybe a part of a character. Empty for an id that the tokenizer lacks."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._decode_piece(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """One token as text, U+FFFD for what is only a part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a mark of the format rather than text."""
        return token_id in self._special_ids

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt that the checkpoint's chat template makes of the messages; encode it without adding special tokens.

        Raises InvalidRequestError (param "messages") if there is no template, or if it refuses the messages.
        """
        return self._templates.select(with_tools=tools is not None).render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=template_kwargs or {},
        )

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._tokenizer.token_to_id(text)

    def _decode_piece(self, token_id: int) -> bytes:
        if token_id in self._special_ids:
            return self._added[token_id].encode()
        if not 0 <= token_id < self.vocab_size:
            return b""
        piece = self._tokenizer.id_to_token(token_id)
        return b"" if piece is None else self._piece_bytes(piece)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in that file; empty if there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return content


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template sources by name. Files of their own win over the config, as in transformers; chat_template.json is the last resort."""
    files = {path.stem: path for path in sorted((folder / "chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        return {name: _read_text(path) for name, path in files.items()}
    in_config = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if in_config is None:
        return {}
    if isinstance(in_config, str):
        return {"default": in_config}
    try:
        return dict(
            in_config if isinstance(in_config, dict) else ((entry["name"], entry["template"]) for entry in in_config)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder}: chat_template: must be a text, or a list of names and templates") from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the tokens that the config names: bos_token and the like, and a model's own, such as image_token."""
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        named |= extra
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _add_missing_tokens(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Adds tokens that only the config knows, in the order of their ids, then special tokens that are nowhere else."""
    present = {token.content: repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    wanted: list[AddedToken] = []
    for _, entry in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        token = AddedToken(**{key: value for key, value in entry.items() if key != "__type"})
        if present.get(token.content) != repr(token):
            wanted.append(token)
    known = {*present, *(token.content for token in wanted)}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    others = [*named.values(), *(_token_text(token) for token in extra if not isinstance(extra, dict))]
    for text in others:
        if text not in known:
            known.add(text)
            wanted.append(AddedToken(text, special=True, normalized=False))
    if wanted:
        tokenizer.add_tokens(wanted)


def _token_text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)
