"""The tiny plain checkpoint of tiny.py as a GGUF file, written the way llama.cpp's converter does it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(file: Path, checkpoint: Path, change: Callable[[gguf.GGUFWriter], None] | None = None) -> Path:
    """`checkpoint`: a plain llama folder of make_tiny_checkpoint. The embedding is stored as Q8_0, the rest as F16 and F32.

    change: adds keys or tensors before the file is written.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, checkpoint)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        new_name = gguf_name(name)
        if (part := new_name.split(".")[-2]) in heads:
            tensor = _permuted(tensor, heads[part])
        if name == "model.embed_tokens.weight":
            packed = gguf.quantize(tensor.astype(np.float32), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(new_name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(new_name, tensor.astype(np.float32) if tensor.ndim == 1 else tensor)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor of a Hugging Face checkpoint."""
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{_NAMES[part]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def tokenizer_metadata(tokenizer_json: Path, pre: str) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE tokenizer -> the metadata keys that a GGUF holds of it."""
    raw = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    vocab = raw["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    special = {token["id"] for token in raw["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if i in special else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in raw["model"]["merges"]],
    }


def _add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path) -> None:
    metadata = tokenizer_metadata(checkpoint / "tokenizer.json", "gpt-2")
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(settings["chat_template"])


def _permuted(weight: Any, num_heads: int) -> Any:
    """Row r of a head's first half and row r of its second half become rows 2r and 2r + 1."""
    out = np.empty_like(weight)
    width = weight.shape[0] // num_heads
    for head in range(num_heads):
        for row in range(width):
            out[head * width + row] = weight[head * width + (row % 2) * (width // 2) + row // 2]
    return out
