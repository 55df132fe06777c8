"""ModelConfig from config.json: both spellings of the rotary settings, defaults, and every refusal by key name."""

import json
from pathlib import Path
from typing import Any

import pytest

from espalier.kernels.rope.frequencies import RopeConfig
from espalier.replicas.errors import CheckpointError
from espalier.replicas.model.config import ModelConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "eos_token_id": [128001, 128008],
}
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def load(folder: Path, changes: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_checkpoint(folder)


def test_llama(tmp_path: Path) -> None:
    config = load(tmp_path, {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {"eos_token_id": 128009})
    assert (config.family, config.head_dim, config.num_kv_heads, config.qk_norm) == ("llama", 64, 8, False)
    assert config.rope == RopeConfig(
        theta=500000.0,
        rope_type="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=8192,
    )
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.max_positions == 131072
    assert not config.tie_word_embeddings
    assert config.quant is None


def test_both_spellings_of_the_rotary_settings_agree(tmp_path: Path) -> None:
    old = load(tmp_path, {"rope_scaling": {"type": "linear", "factor": 2.0}})
    new = load(
        tmp_path,
        {"rope_theta": None, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}},
    )
    assert old == new


def test_yarn_lengthens_the_context(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = load(
        tmp_path, {"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40960, "rope_scaling": yarn}
    )
    assert config.qk_norm
    assert config.max_positions == 131072
    assert config.rope.beta_fast == 32.0


def test_windows_that_are_off_are_no_windows(tmp_path: Path) -> None:
    load(tmp_path, {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": False})
    load(tmp_path, {"architectures": ["MistralForCausalLM"], "sliding_window": None})
    load(tmp_path, {"layer_types": ["full_attention"] * 16})


def test_quantization_is_for_people(tmp_path: Path) -> None:
    quant = {"quant_method": "exl3", "bits": 4.0, "head_bits": 6, "codebook": "mul1"}
    config = load(tmp_path, {"quantization_config": quant})
    assert config.quant is not None
    assert (config.quant.bits, config.quant.head_bits, config.quant.codebook) == (4.0, 6.0, "mul1")


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("architectures", {"architectures": ["GemmaForCausalLM"]}),
    ("architectures", {"architectures": []}),
    ("architectures", {"architectures": "LlamaForCausalLM"}),
    ("hidden_act", {"hidden_act": "gelu"}),
    ("rope_scaling.rope_type", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    ("rope_scaling.rope_type", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}),
    ("rope_parameters.rope_type", {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}),
    ("rope_scaling.mscale", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}),
    ("rope_scaling.mrope_section", {"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}),
    ("rope_scaling.factor", {"rope_scaling": {"rope_type": "linear"}}),
    ("rope_scaling.factor", {"rope_scaling": {"rope_type": "linear", "factor": -2.0}}),
    ("rope_scaling.low_freq_factor", {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": None}}),
    ("rope_scaling.high_freq_factor", {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}),
    ("rope_theta", {"rope_theta": "big"}),
    ("rope_theta", {"rope_theta": None}),
    ("partial_rotary_factor", {"partial_rotary_factor": 0.5}),
    ("rope_parameters.partial_rotary_factor", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
    ("sliding_window", {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}),
    ("sliding_window", {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096, "use_sliding_window": True}),
    ("layer_types[1]", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("final_logit_softcapping", {"final_logit_softcapping": 30.0}),
    ("num_local_experts", {"num_local_experts": 8}),
    ("quantization_config.quant_method", {"quantization_config": {"quant_method": "gptq"}}),
    ("num_attention_heads", {"num_attention_heads": None}),
    ("num_hidden_layers", {"num_hidden_layers": 0}),
    ("hidden_size", {"hidden_size": True}),
    ("num_key_value_heads", {"num_key_value_heads": 5}),
    ("head_dim", {"head_dim": 63}),
    ("rms_norm_eps", {"rms_norm_eps": 0}),
    ("tie_word_embeddings", {"tie_word_embeddings": "yes"}),
    ("eos_token_id", {"eos_token_id": ["</s>"]}),
]


@pytest.mark.parametrize(("key", "changes"), REFUSED, ids=[f"{i}-{key}" for i, (key, _) in enumerate(REFUSED)])
def test_refusals_name_the_key(tmp_path: Path, key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, changes)
    assert caught.value.param == key
    assert "config.json" in caught.value.message


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_an_unreadable_config_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_checkpoint(tmp_path)
