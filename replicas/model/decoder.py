"""The network: decoder layers over a paged cache, every row by the same arithmetic. Knows tensors and a `Batch`, not sequences or files."""

from dataclasses import dataclass

from torch import Tensor

from espalier.kernels.activation.reference import silu_mul
from espalier.kernels.attention.reference import paged_attention
from espalier.kernels.norm.reference import rms_norm
from espalier.kernels.rope.reference import rotate
from espalier.replicas.batch import Batch
from espalier.replicas.cache.storage import KVCache
from espalier.replicas.model.config import ModelConfig
from espalier.replicas.model.linear import Embedding, PackedLinear


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer. Norms are fp32 vectors; q_norm and k_norm exist in Qwen3 only."""

    input_norm: Tensor
    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_out: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class Decoder:
    """The whole model. cos, sin: fp32 [positions, head_dim / 2]."""

    config: ModelConfig
    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor
    head: PackedLinear
    cos: Tensor
    sin: Tensor

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Computes all rows, writes their keys and values to the cache, and returns the logits of the sampled rows.

        -> fp32 [sampled rows, vocab].
        """
        x = self.embedding(batch.token_ids)
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]
        for index, layer in enumerate(self.layers):
            attended = self._attend(layer, x, batch, cache, index, cos, sin)
            x = x + layer.attention_out(attended)[0]
            gate, up = layer.gate_up(rms_norm(x, layer.mlp_norm, self.config.norm_eps))
            x = x + layer.down(silu_mul(gate, up))[0]
        if batch.num_sampled == 0:
            return x.new_empty((0, self.config.vocab_size))
        last = rms_norm(x[batch.sampled_rows], self.final_norm, self.config.norm_eps)
        return self.head(last)[0][: batch.num_sampled]

    def _attend(
        self, layer: DecoderLayer, x: Tensor, batch: Batch, cache: KVCache, index: int, cos: Tensor, sin: Tensor
    ) -> Tensor:
        config = self.config
        rows = x.shape[0]
        q, k, v = layer.qkv(rms_norm(x, layer.input_norm, config.norm_eps))
        q = q.reshape(rows, config.num_heads, config.head_dim)
        k = k.reshape(rows, config.num_kv_heads, config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = rms_norm(q, layer.q_norm, config.norm_eps), rms_norm(k, layer.k_norm, config.norm_eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        # Keys and values go to the cache first: a row reads its own from there too, rounded as later rows will find it.
        cache.store(index, batch.slots, k, v.reshape(k.shape))
        attended = paged_attention(q, cache.keys[index], cache.values[index], batch.attention, cache.workspace)
        return attended.view(rows, config.num_heads * config.head_dim)
