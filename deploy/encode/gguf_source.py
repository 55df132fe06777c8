"""A GGUF file as a source: tensors dequantized and renamed, config.json and the tokenizer's files rebuilt from its metadata.

Refuses metadata and tensors it does not know, because leaving them out could change the model. See gguf_tokenizer.py for the tokenizer.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from espalier.deploy.encode.gguf_tokenizer import write_tokenizer
from espalier.replicas.errors import CheckpointError
from espalier.replicas.model.config import ModelConfig
from espalier.replicas.model.families import NetworkSpec, network_spec

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# config.json key -> key below the architecture's prefix.
_CONFIG_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_OTHER_KEYS = (
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "vocab_size",
)
_GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class GgufSource:
    """An open GGUF file. tensors: by GGUF name. folder: where config.json and the tokenizer's files were written."""

    path: Path
    folder: Path
    config: ModelConfig
    spec: NetworkSpec
    tensors: Mapping[str, gguf.ReaderTensor]
    rows_permuted: bool

    @property
    def head_is_tied(self) -> bool:
        return not self.has("lm_head.weight")

    def files(self) -> list[Path]:
        return sorted(self.folder.iterdir())

    def has(self, name: str) -> bool:
        return _gguf_name(name) in self.tensors

    def read(self, name: str) -> Tensor:
        """fp32, in the order of rows that config.json's rotation expects."""
        stored = self.tensors.get(_gguf_name(name))
        if stored is None:
            raise CheckpointError(f"{self.path}: {_gguf_name(name)}: tensor is missing")
        try:
            values = gguf.dequantize(stored.data, stored.tensor_type)
        except NotImplementedError as e:
            raise CheckpointError(
                f"{self.path}: {stored.name}: type {stored.tensor_type.name} cannot be decoded"
            ) from e
        tensor = torch.from_numpy(np.array(values, dtype=np.float32))
        for part, num_heads in ((".q_proj.", self.config.num_heads), (".k_proj.", self.config.num_kv_heads)):
            if self.rows_permuted and part in name:
                tensor = undo_row_permutation(tensor, num_heads)
        return tensor


def undo_row_permutation(tensor: Tensor, num_heads: int) -> Tensor:
    """Rows of each head interleaved (0, h/2, 1, h/2 + 1, ...), as llama GGUFs hold q and k, -> halves; a bias is one column."""
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def open_gguf(path: Path, scratch: Path) -> GgufSource:
    """Read the header of `path` and write config.json, generation_config.json and the tokenizer's files into `scratch`.

    Raises CheckpointError naming the file and the key or tensor at fault.
    """
    try:
        reader = gguf.GGUFReader(path)
    except Exception as e:  # the reader checks little: a broken file ends in whatever error its parts happen to raise
        raise CheckpointError(f"{path}: cannot be read as GGUF: {type(e).__name__}: {e}") from e
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    scratch.mkdir(parents=True, exist_ok=True)
    config = _config(path, metadata, tied="output.weight" not in tensors)
    _write_json(scratch / "config.json", config)
    generation: dict[str, Any] = {key: config[key] for key in _GENERATION_KEYS if key in config}
    _write_json(scratch / "generation_config.json", generation)
    write_tokenizer(path, metadata, scratch)
    model = ModelConfig.from_checkpoint(scratch)
    source = GgufSource(
        path, scratch, model, network_spec(model), tensors, rows_permuted=config["model_type"] == "llama"
    )
    _check_tensors(source)
    return source


def _config(path: Path, metadata: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{path}: general.architecture: {architecture!r} cannot be encoded, only {', '.join(_ARCHITECTURES)}"
        )
    prefix = f"{architecture}."
    keys = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key, value in keys.items():
        if key not in (*_CONFIG_KEYS.values(), *_OTHER_KEYS):
            raise CheckpointError(f"{path}: {prefix}{key}: {value!r} has no place in config.json")
    for key in _CONFIG_KEYS.values():
        if key not in keys:
            raise CheckpointError(f"{path}: {prefix}{key}: is missing")
    config: dict[str, Any] = {name: _number(keys[key]) for name, key in _CONFIG_KEYS.items()}
    head_dim = keys.get("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, head_dim) != head_dim:
            raise CheckpointError(f"{path}: {prefix}{key}: {keys[key]} differs from the head's {head_dim}")
    config |= {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "num_key_value_heads": keys.get("attention.head_count_kv", config["num_attention_heads"]),
        "head_dim": head_dim,
        "vocab_size": len(metadata.get("tokenizer.ggml.tokens", ())) or keys.get("vocab_size", 0),
        "rope_theta": _number(keys.get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(path, prefix, keys),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": "float16",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token_id"] = token_id
    return config


def _rope_scaling(path: Path, prefix: str, keys: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn") or "rope.scaling.factor" not in keys:
        raise CheckpointError(f"{path}: {prefix}rope.scaling.type: {kind!r} is not known, or has no factor")
    scaling = {"rope_type": kind, "factor": _number(keys["rope.scaling.factor"])}
    if kind == "yarn":
        original = keys.get("rope.scaling.original_context_length")
        if original is None:
            raise CheckpointError(f"{path}: {prefix}rope.scaling.original_context_length: is missing")
        scaling["original_max_position_embeddings"] = original
    return scaling


def _number(value: float) -> float:
    """A float32 of the metadata as the shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _gguf_name(name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = _LAYER_NAME.fullmatch(name)
    assert match is not None or name == "lm_head.bias", name
    return name if match is None else f"blk.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _check_tensors(source: GgufSource) -> None:
    """Every needed tensor is there in its shape, and no other that would be left out."""
    spec, needed = source.spec, dict[str, tuple[int, ...]]()
    needed[spec.embedding] = (spec.vocab_size, spec.hidden_size)
    for vector in (spec.final_norm, *(vector for layer in spec.layers for vector in layer.vectors)):
        needed[vector.name] = (vector.size,)
    linears = [linear for layer in spec.layers for linear in layer.linears]
    for linear in [*linears, *([] if source.head_is_tied else [spec.head])]:
        needed[f"{linear.key}.weight"] = (linear.out_features, linear.in_features)
    for linear in linears:
        if source.has(f"{linear.key}.bias"):
            needed[f"{linear.key}.bias"] = (linear.out_features,)
    for name, shape in needed.items():
        stored = source.tensors.get(_gguf_name(name))
        if stored is None:
            raise CheckpointError(f"{source.path}: {_gguf_name(name)}: tensor is missing")
        # GGUF names the fastest dimension first.
        if (found := tuple(int(n) for n in reversed(stored.shape))) != shape:
            raise CheckpointError(f"{source.path}: {stored.name}: shape must be {list(shape)}, is {list(found)}")
    unknown = source.tensors.keys() - {_gguf_name(name) for name in needed}
    if unknown:
        raise CheckpointError(f"{source.path}: {min(unknown)}: tensor has no place in a {source.config.family} model")


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
