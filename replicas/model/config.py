"""ModelConfig: what the network is, from a checkpoint's config.json. Refuses by key name whatever would make another network of it.

Knows the served architectures (Llama, Mistral without a window, Qwen2, Qwen3) and no tensors.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from espalier.kernels.rope.frequencies import RopeConfig, RopeType
from espalier.replicas.errors import CheckpointError

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Keys that other models of the served architectures' kin use, with the values that leave the arithmetic as it is.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1, 1.0),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "attn_output_gate": (None, False),
    "no_rope_layers": (None, []),
    "use_qk_norm": (None, False),
    "qk_layernorm": (None, False),
    "alibi": (None, False),
    "use_mrope": (None, False),
    "is_causal": (None, True),
    "use_bidirectional_attention": (None, False),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
}
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}
_ROPE_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """What `quantization_config` says of an EXL3 checkpoint, for people: the tensors decide what is loaded."""

    bits: float | None
    head_bits: float | None
    codebook: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """True widths of the network; stored tensors may be padded.

    family: llama, qwen2 or qwen3. qk_norm: RMS norm of each query and key head before the rotation. max_positions: the model's own limit.
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qk_norm: bool
    quant: QuantConfig | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_checkpoint(cls, path: Path) -> "ModelConfig":
        """From `path`/config.json, with end tokens of generation_config.json. Raises CheckpointError naming the file and the key."""
        file = path / "config.json"
        raw = _Keys(file, read_json(file))
        generation_file = path / "generation_config.json"
        generation = read_json(generation_file) if generation_file.exists() else {}
        family = _family(raw)
        _refuse_other_arithmetic(raw)
        num_heads, hidden_size = raw.count("num_attention_heads"), raw.count("hidden_size")
        num_kv_heads = raw.count("num_key_value_heads", num_heads)
        head_dim = raw.count("head_dim", hidden_size // num_heads)
        if num_heads % num_kv_heads:
            raise raw.error("num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}")
        if head_dim % 2:
            raise raw.error("head_dim", f"{head_dim} is odd, so it cannot be rotated in halves")
        rope, max_positions = _rope(raw)
        eos = _eos_ids(raw, raw.get("eos_token_id")) + _eos_ids(
            _Keys(generation_file, generation), generation.get("eos_token_id")
        )
        return cls(
            family=family,
            num_layers=raw.count("num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=raw.count("intermediate_size"),
            vocab_size=raw.count("vocab_size"),
            max_positions=max_positions,
            norm_eps=raw.positive("rms_norm_eps"),
            rope=rope,
            tie_word_embeddings=raw.flag("tie_word_embeddings", False),
            qk_norm=family == "qwen3",
            quant=_quant(raw),
            eos_token_ids=tuple(sorted(set(eos))),
        )


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in `file`; CheckpointError when it is absent or something else."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise CheckpointError(f"{file}: cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise CheckpointError(f"{file}: is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: must hold a JSON object")
    return value


class _Keys:
    """Typed reading of one JSON object; errors name the file and the key."""

    def __init__(self, file: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.file, self.values, self.prefix = file, values, prefix

    def error(self, key: str, message: str) -> CheckpointError:
        return CheckpointError(f"{self.file}: {self.prefix}{key}: {message}", param=self.prefix + key)

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, f"must be a positive integer, is {value!r}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(key, f"must be a positive number, is {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, is {value!r}")
        return value

    def section(self, key: str) -> "_Keys":
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, f"must be an object, is {value!r}")
        return _Keys(self.file, value, f"{self.prefix}{key}.")


def _family(raw: _Keys) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise raw.error("architectures", f"must name one architecture, is {names!r}")
    if not isinstance(names[0], str) or names[0] not in ARCHITECTURES:
        raise raw.error("architectures", f"{names[0]!r} is not served; served are {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[names[0]]


def _refuse_other_arithmetic(raw: _Keys) -> None:
    for key in ("hidden_act", "hidden_activation"):
        if raw.get(key, "silu") not in ("silu", "swish"):
            raise raw.error(key, f"activation {raw.get(key)!r} is not served, only silu")
    for key, neutral in _NEUTRAL.items():
        if raw.get(key) not in neutral:
            raise raw.error(key, f"{raw.get(key)!r} is not served")
    kinds = raw.get("layer_types", [])
    if not isinstance(kinds, list):
        raise raw.error("layer_types", f"must be a list, is {kinds!r}")
    for index, kind in enumerate(kinds):
        if kind != "full_attention":
            raise raw.error(f"layer_types[{index}]", f"{kind!r} is not served, only full_attention")
    # Qwen configs carry a window and a flag that it is off; Mistral configs use the window if there is one.
    window = raw.get("sliding_window")
    uses_window = raw.flag("use_sliding_window", _window_by_default(raw) and window is not None)
    if uses_window and (not isinstance(window, int) or window < raw.count("max_position_embeddings")):
        raise raw.error("sliding_window", f"attention within a window of {window!r} tokens is not served")
    method = raw.section("quantization_config").get("quant_method")
    if method not in (None, "exl3"):
        raise raw.error("quantization_config.quant_method", f"{method!r} is not served, only exl3")


def _window_by_default(raw: _Keys) -> bool:
    return bool(raw.get("architectures")[0] == "MistralForCausalLM")


def _rope(raw: _Keys) -> tuple[RopeConfig, int]:
    """The rotary settings, in the newer or the older spelling, and the longest context they are made for."""
    newer = raw.get("rope_parameters") is not None
    name = "rope_parameters" if newer else "rope_scaling"
    keys = raw.section(name)
    theta = keys.positive("rope_theta", raw.positive("rope_theta", 10000.0)) if newer else raw.positive("rope_theta")
    rope_type = keys.get("rope_type", keys.get("type", "default"))
    if rope_type not in _ROPE_TYPES:
        raise keys.error("rope_type", f"{rope_type!r} is not served; served are {', '.join(_ROPE_TYPES)}")
    for key in keys.values:
        if key not in (*_ROPE_COMMON, *_ROPE_KEYS[rope_type]) and keys.get(key) is not None:
            raise keys.error(key, f"is not served with rope type {rope_type}")
    if keys.get("partial_rotary_factor", 1.0) != 1.0:
        raise keys.error("partial_rotary_factor", f"{keys.get('partial_rotary_factor')!r} is not served, only 1.0")
    max_positions = raw.count("max_position_embeddings")
    factor = keys.positive("factor") if rope_type != "default" else 1.0
    original = 0
    if rope_type in ("llama3", "yarn"):
        # transformers takes the key beside the rotary settings too, and for yarn the model's limit when there is none.
        fallback = raw.get("original_max_position_embeddings", max_positions if rope_type == "yarn" else None)
        original = keys.count("original_max_position_embeddings", fallback)
    attention_factor = keys.get("attention_factor")
    rope = RopeConfig(
        theta=theta,
        rope_type=cast(RopeType, rope_type),
        factor=factor,
        low_freq_factor=keys.positive("low_freq_factor") if rope_type == "llama3" else 1.0,
        high_freq_factor=keys.positive("high_freq_factor") if rope_type == "llama3" else 4.0,
        original_max_positions=original,
        beta_fast=keys.positive("beta_fast", 32.0),
        beta_slow=keys.positive("beta_slow", 1.0),
        attention_factor=None if attention_factor is None else keys.positive("attention_factor"),
    )
    if rope_type == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise keys.error("high_freq_factor", "must be larger than low_freq_factor")
    if rope_type == "yarn":
        max_positions = max(max_positions, int(original * factor))
    return rope, max_positions


def _quant(raw: _Keys) -> QuantConfig | None:
    if raw.get("quantization_config") is None:
        return None
    keys = raw.section("quantization_config")

    def number(key: str) -> float | None:
        value = keys.get(key)
        return float(value) if isinstance(value, int | float) else None

    codebook = keys.get("codebook")
    return QuantConfig(number("bits"), number("head_bits"), codebook if isinstance(codebook, str) else None)


def _eos_ids(keys: _Keys, value: Any) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise keys.error("eos_token_id", f"must be token ids, is {value!r}")
    return ids
