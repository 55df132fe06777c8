"""Small real tokenizers made on the spot, one of each family that the tokenizer code knows, and texts that are hard to cut.

Each is written as a checkpoint's files into a folder. Their vocabularies are small, so most of the world's characters come out as several
byte tokens, which is what detokenization has to be good at.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = (
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox does not.",
    "  leading and   inner spaces\n\n\ttabs and\r\nline ends  ",
    "naïve café, Ærøskøbing, Žluťoučký kůň, ñandú",
    "日本語のテキスト、中文字符和标点。한국어 문장",
    "नमस्ते दुनिया, مرحبا بالعالم, שלום עולם, བོད་སྐད",
    "emoji: \U0001f600 \U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f3f3\ufe0f\u200d\U0001f308",
    "emoji: \U0001f44d\U0001f3fd \U0001f1eb\U0001f1f7 e\u0301 \u200b",
    "math ∑∫√∞ ≠ ≤, \U0001d518\U0001d52b\U0001d526 \U00013080 \U0010ffff",
    'code: if (x < 10) { return "<|end|>"; } // <0xE2> ▁ Ġ � \x00\x1f',
)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def write_byte_level(folder: Path, *, vocab_size: int = 400, chat_template: Any = CHATML) -> Path:
    """Byte-level BPE, as Llama 3, Qwen and SmolLM have it; ids 0..2 are special, and one added token is ordinary text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[AddedToken(text, special=True, normalized=False) for text in _SPECIAL],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            max_token_length=8,
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    config = {
        "bos_token": _SPECIAL[1],
        "eos_token": _SPECIAL[2],
        "pad_token": _SPECIAL[0],
        "chat_template": chat_template,
    }
    return _write(folder, tokenizer.to_str(), config)


def write_byte_fallback(folder: Path, *, vocab_size: int = 200) -> Path:
    """SentencePiece-like BPE with byte fallback, as Llama 2 and Mistral have it; <s> is put before a text, whose first space is implied."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = _mark_spaces()
    trained.train_from_iterator(
        TEXTS[:2], trainers.BpeTrainer(vocab_size=vocab_size, max_token_length=6, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), _mark_spaces()])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in pieces[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _write(
        folder,
        tokenizer.to_str(),
        {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "unk_token": "<unk>"},
    )


def _mark_spaces() -> normalizers.Normalizer:
    return normalizers.Replace(" ", "▁")


def _write(folder: Path, tokenizer_json: str, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
