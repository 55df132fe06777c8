"""Shapes of networks to make at random, and the config.json of each. All are plain Qwen3: dense, full attention, normed heads."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Widths as config.json names them; eos_token_id as in the tokenizer that models of this shape have."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    eos_token_id: int

    def config(self) -> dict[str, Any]:
        """config.json without its quantization_config."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "rope_scaling": None,
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": False,
            "eos_token_id": self.eos_token_id,
            "torch_dtype": "float16",
        }


SHAPES = {
    "tiny": Shape(
        num_layers=2,
        hidden_size=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=384,
        vocab_size=512,
        max_positions=4096,
        eos_token_id=2,
    ),
    "qwen3-8b": Shape(
        num_layers=36,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=12288,
        vocab_size=151_936,
        max_positions=40_960,
        eos_token_id=151_645,
    ),
    # Depth and widths of the 27B models of the Qwen3.5 line, all of its layers with the attention of a dense Qwen3.
    "qwen3-27b": Shape(
        num_layers=64,
        hidden_size=5120,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=17_408,
        vocab_size=248_320,
        max_positions=40_960,
        eos_token_id=248_046,
    ),
}
