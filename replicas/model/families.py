"""Per architecture: which tensors of a checkpoint the network is made of, by name and true shape. Reads nothing."""

from dataclasses import dataclass

from espalier.replicas.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A linear layer: `key`.weight [out_features, in_features], or an EXL3 group of that key; `key`.bias if the checkpoint has it."""

    key: str
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class VectorSpec:
    """A plain vector, such as a norm's weight."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer. qkv and gate_up share their input, and are computed as one linear each."""

    prefix: str
    input_norm: VectorSpec
    qkv: tuple[LinearSpec, LinearSpec, LinearSpec]
    q_norm: VectorSpec | None
    k_norm: VectorSpec | None
    attention_out: LinearSpec
    mlp_norm: VectorSpec
    gate_up: tuple[LinearSpec, LinearSpec]
    down: LinearSpec

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """In the order of computation."""
        return (*self.qkv, self.attention_out, *self.gate_up, self.down)

    @property
    def vectors(self) -> tuple[VectorSpec, ...]:
        """Norm weights."""
        return tuple(v for v in (self.input_norm, self.q_norm, self.k_norm, self.mlp_norm) if v is not None)


@dataclass(frozen=True, slots=True)
class NetworkSpec:
    """The whole network. The head falls back to the embedding table when it is tied and the checkpoint has no head."""

    embedding: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    final_norm: VectorSpec
    head: LinearSpec
    head_may_be_tied: bool


def network_spec(config: ModelConfig) -> NetworkSpec:
    """Names are the same in all served families; they differ in q_norm and k_norm (Qwen3) and in biases, which go by presence."""
    return NetworkSpec(
        embedding="model.embed_tokens.weight",
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        layers=tuple(_layer(config, index) for index in range(config.num_layers)),
        final_norm=VectorSpec("model.norm.weight", config.hidden_size),
        head=LinearSpec("lm_head", config.hidden_size, config.vocab_size),
        head_may_be_tied=config.tie_word_embeddings,
    )


def _layer(config: ModelConfig, index: int) -> LayerSpec:
    prefix = f"model.layers.{index}."
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return LayerSpec(
        prefix=prefix,
        input_norm=VectorSpec(prefix + "input_layernorm.weight", hidden),
        qkv=(
            LinearSpec(attention + "q_proj", hidden, q_width),
            LinearSpec(attention + "k_proj", hidden, kv_width),
            LinearSpec(attention + "v_proj", hidden, kv_width),
        ),
        q_norm=VectorSpec(attention + "q_norm.weight", config.head_dim) if config.qk_norm else None,
        k_norm=VectorSpec(attention + "k_norm.weight", config.head_dim) if config.qk_norm else None,
        attention_out=LinearSpec(attention + "o_proj", q_width, hidden),
        mlp_norm=VectorSpec(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=(
            LinearSpec(mlp + "gate_proj", hidden, intermediate),
            LinearSpec(mlp + "up_proj", hidden, intermediate),
        ),
        down=LinearSpec(mlp + "down_proj", intermediate, hidden),
    )
