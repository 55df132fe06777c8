"""tokenizer.json and tokenizer_config.json from the metadata of a GGUF file. Byte-level BPE only, with the splits it knows by name."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from espalier.replicas.errors import CheckpointError

# Values of tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED = 3, 4
_SPECIAL_NAMES = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
_GPT4_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_then_byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _split_then_byte_level(digits: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_GPT4_SPLIT.replace("DIGITS", digits)), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# By the name in tokenizer.ggml.pre: how text is split before merging.
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level,
    "smollm": _digits_then_byte_level,
    "qwen2": lambda: _split_then_byte_level(""),
    "llama-bpe": lambda: _split_then_byte_level("{1,3}"),
}
_NORMALIZED = ("qwen2",)  # to NFC
_WHOLE_WORDS_FIRST = ("llama-bpe",)  # a word of the vocabulary is one token whatever the merges say


def write_tokenizer(path: Path, metadata: Mapping[str, Any], folder: Path) -> None:
    """Write both files into `folder`. Raises CheckpointError naming `path` and the key that is missing or not known."""

    def get(key: str) -> Any:
        if f"tokenizer.ggml.{key}" not in metadata:
            raise CheckpointError(f"{path}: tokenizer.ggml.{key}: is missing")
        return metadata[f"tokenizer.ggml.{key}"]

    if get("model") != "gpt2":
        raise CheckpointError(
            f"{path}: tokenizer.ggml.model: {get('model')!r} is not known, only gpt2 (byte-level BPE)"
        )
    if (pre := get("pre")) not in _PRE_TOKENIZERS:
        raise CheckpointError(f"{path}: tokenizer.ggml.pre: {pre!r} is not known, only {', '.join(_PRE_TOKENIZERS)}")
    tokens, types = get("tokens"), get("token_type")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[_merge(line) for line in get("merges")],
            ignore_merges=pre in _WHOLE_WORDS_FIRST,
        )
    )
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    added = {i: kind == _CONTROL for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)}
    for i, special in added.items():
        token = AddedToken(tokens[i], normalized=False, special=special)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        bos = tokens[get("bos_token_id")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, get("bos_token_id"))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))

    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(i): {
                "content": tokens[i],
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": special,
            }
            for i, special in added.items()
        },
    }
    for key, name in _SPECIAL_NAMES.items():
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[name] = tokens[token_id]
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _merge(line: str) -> tuple[str, str]:
    left, _, right = line.partition(" ")
    return left, right
