"""A tiny random checkpoint made on the spot: EXL3 or plain linears, a real byte-level BPE tokenizer, a ChatML template.

It needs no model hub and takes a fraction of a second, so a session fixture may call it once and share the folder. The trellises
are random bits (every bit pattern is a valid one); the scales are chosen so that attention is peaked and logits spread over a few
units: greedy continuations wander instead of falling into one token, and an inexact engine picks other tokens soon.
Knows the format on disk, nothing of the code that reads it.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TinyArchitecture = Literal["llama", "qwen2", "qwen3"]
TinyCodebook = Literal["3inst", "mcg", "mul1"]
TinyHead = Literal["quantized", "plain", "tied"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
TOKENIZER_VOCAB = 512

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_CLASS_NAMES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_MARKERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
# Standard deviation of the codebook's values (exl3-format 2.3).
_CODEBOOK_STD = {"3inst": 1.24371, "mcg": 1.24411, "mul1": 1.00031}
# Output RMS of each linear for an input of RMS 1. Chosen by eye: peaked attention, no layer drowned by another.
_GAINS = {
    "q_proj": 1.6,
    "k_proj": 1.6,
    "v_proj": 1.0,
    "o_proj": 1.5,
    "gate_proj": 1.5,
    "up_proj": 1.0,
    "down_proj": 1.2,
    "lm_head": 2.5,
}
_EMBEDDING_STD = 0.2


def make_tiny_checkpoint(
    folder: Path,
    *,
    architecture: TinyArchitecture = "llama",
    quantized: bool = True,
    seed: int = 0,
    bits: float = 4,
    head_bits: float = 6,
    codebook: TinyCodebook = "mul1",
    head: TinyHead = "quantized",
    layers: int = 2,
    hidden: int = 128,
    intermediate: int = 256,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    vocab: int = 512,
    max_positions: int = 4096,
    shards: int = 1,
    config_overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write the checkpoint into `folder` (made when absent) and return it.

    bits, head_bits: 1..8, or 1.5, 2.5, 3.5 with mul1. head: "quantized" falls back to "plain" when `quantized` is false.
    Widths need not be multiples of 128: quantized tensors are padded as exl3-format 1.4 says, the config keeps the true widths.
    vocab: at least 512, the tokenizer's size; further ids are padding rows. shards: safetensors files. config_overrides: last word
    on config.json (say, rope_scaling).
    """
    assert vocab >= TOKENIZER_VOCAB, vocab
    assert hidden % 2 == 0 and head_dim % 2 == 0 and heads % kv_heads == 0
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def normal(*shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std + mean).half()

    def add_linear(key: str, num_in: int, num_out: int, *, rate: float | None, bias: bool = False) -> None:
        gain = _GAINS[key.rpartition(".")[2]]
        if rate is None:
            tensors[f"{key}.weight"] = normal(num_out, num_in, std=gain / math.sqrt(num_in))
            if bias:
                tensors[f"{key}.bias"] = normal(num_out, std=0.3)
            return
        scale = gain / math.sqrt(num_in) / _CODEBOOK_STD[codebook]
        tensors.update(_random_exl3(key, num_in, num_out, rate, codebook, scale, generator))
        if bias:
            padded = torch.zeros(_padded(num_out), dtype=torch.float16)
            padded[:num_out] = normal(num_out, std=0.3)
            tensors[f"{key}.bias"] = padded

    rate = bits if quantized else None
    tensors["model.embed_tokens.weight"] = normal(vocab, hidden, std=_EMBEDDING_STD)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = normal(hidden, std=0.1, mean=1.0)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = normal(hidden, std=0.1, mean=1.0)
        qkv_bias = architecture == "qwen2"
        add_linear(f"{prefix}.self_attn.q_proj", hidden, heads * head_dim, rate=rate, bias=qkv_bias)
        add_linear(f"{prefix}.self_attn.k_proj", hidden, kv_heads * head_dim, rate=rate, bias=qkv_bias)
        add_linear(f"{prefix}.self_attn.v_proj", hidden, kv_heads * head_dim, rate=rate, bias=qkv_bias)
        add_linear(f"{prefix}.self_attn.o_proj", heads * head_dim, hidden, rate=rate)
        if architecture == "qwen3":
            tensors[f"{prefix}.self_attn.q_norm.weight"] = normal(head_dim, std=0.1, mean=1.6)
            tensors[f"{prefix}.self_attn.k_norm.weight"] = normal(head_dim, std=0.1, mean=1.6)
        add_linear(f"{prefix}.mlp.gate_proj", hidden, intermediate, rate=rate)
        add_linear(f"{prefix}.mlp.up_proj", hidden, intermediate, rate=rate)
        add_linear(f"{prefix}.mlp.down_proj", intermediate, hidden, rate=rate)
    tensors["model.norm.weight"] = normal(hidden, std=0.1, mean=1.0)
    if head != "tied":
        add_linear("lm_head", hidden, vocab, rate=head_bits if quantized and head == "quantized" else None)
    _write_tensors(folder, tensors, shards)

    config: dict[str, Any] = {
        "architectures": [_CLASS_NAMES[architecture]],
        "model_type": architecture,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5 if architecture == "llama" else 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": head == "tied",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "float16",
    }
    if quantized:
        config["quantization_config"] = {
            "quant_method": "exl3",
            "version": "1.6.5",
            "bits": bits,
            "head_bits": head_bits if head == "quantized" else 16,
            "codebook": codebook,
        }
    config |= dict(config_overrides or {})
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0})
    write_tiny_tokenizer(folder)
    return folder


def write_tiny_tokenizer(folder: Path) -> None:
    """tokenizer.json (512 ids: 3 specials, 256 bytes, 253 merges) and tokenizer_config.json with a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_VOCAB,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT], trainer)
    assert tokenizer.get_vocab_size() == TOKENIZER_VOCAB, tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "<|endoftext|>",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
            "chat_template": CHATML,
            "added_tokens_decoder": {
                str(i): {
                    "content": token,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": True,
                }
                for i, token in enumerate(SPECIAL_TOKENS)
            },
        },
    )


def _random_exl3(
    key: str, num_in: int, num_out: int, rate: float, codebook: str, scale: float, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """The tensors of one linear (exl3-format 1.2) whose effective weight has a standard deviation of about scale * codebook's."""
    assert rate in (1, 2, 3, 4, 5, 6, 7, 8) or (rate in (1.5, 2.5, 3.5) and codebook == "mul1"), (rate, codebook)
    padded_in, padded_out = _padded(num_in), _padded(num_out)
    shape = (padded_in // 16, padded_out // 16, int(16 * rate))

    def signed_scales(size: int, magnitude: float) -> torch.Tensor:
        signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1.0
        return signs * (torch.rand(size, generator=generator) + 0.5) * magnitude

    suh, svh = signed_scales(padded_in, 1.0), signed_scales(padded_out, scale)
    svh[num_out:] = 0.0
    tensors = {
        f"{key}.trellis": torch.randint(-32768, 32768, shape, generator=generator).to(torch.int16),
        f"{key}.suh": suh.half(),
        f"{key}.svh": svh.half(),
    }
    if codebook in _MARKERS:
        tensors[f"{key}.{codebook}"] = torch.tensor(_MARKERS[codebook] - (1 << 32), dtype=torch.int32)
    return tensors


def _padded(width: int) -> int:
    return -(-width // 128) * 128


def _write_tensors(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        save_file(part, str(folder / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


# Ours; only its letter statistics matter. Long enough that training finds all its merges.
_TRAINING_TEXT = """
A trellis is a frame of thin bars on which a plant is trained to grow flat against a wall. The gardener ties the young
branches while they still bend, one year a row, and cuts away whatever grows forward. After some seasons the tree covers
the whole wall, every branch is in the sun, and the fruit can be picked without a ladder. What looks like a drawing is only
patience: small cuts, made early, always in the same places. The same idea serves whoever keeps a machine that answers many
people at once. Each question goes to the branch that has the most room; a branch that breaks is tied again or grown anew,
and the neighbours never notice. Which city is the capital of France? Paris. How much is 12 + 30? It is 42. Write a function
that adds two numbers: def add(first, second): return first + second. Then print(add(1, 2)) shows 3. The user asks, the
assistant answers, and the system says how. Once upon a time there was a small model that had read very little, and so it
spoke in fragments; but it always spoke the same fragments when it was asked the same thing, and that was what it was for.
"""
