"""The network on a GPU: its weights, and the launches of one round over static buffers. Knows no sequences, no files and no graphs.

The arithmetic of a row, wherever it runs: the residual stream is fp32; a linear's input is normed in fp32 and rotated to fp16 (plain weights
read it in fp32); q, k, v, gate and up come out in fp16, what is added to the stream and the logits in fp32; keys and values are rounded to the
cache's type, attention's mix is fp32. Every kernel keeps a row's bits to itself, so padding rows and the choice of buffers change nothing.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels.activation.silu_mul import silu_mul
from espalier.kernels.activation.silu_mul_rotate import silu_mul_rotate
from espalier.kernels.attention.lanes import LaneTable
from espalier.kernels.attention.paged import paged_attention
from espalier.kernels.counters import Scratch
from espalier.kernels.embedding.gather import gather
from espalier.kernels.linear.dense import DenseGroup, dense_linear
from espalier.kernels.linear.exl3_linear import exl3_linear, linear_rotated
from espalier.kernels.linear.group import LinearGroup
from espalier.kernels.norm.add_norm_rotate import add_norm_rotate
from espalier.kernels.rope.norm_rotate_store import norm_rotate_store
from espalier.replicas.gpu.activations import Activations, StreamBuffers
from espalier.replicas.gpu.kv import DeviceKV
from espalier.replicas.model.config import ModelConfig

Linears = LinearGroup | DenseGroup


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """Weights of one layer on the device. Norms are fp32 vectors; q_norm and k_norm exist in Qwen3 only."""

    input_norm: Tensor
    qkv: Linears
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_out: Linears
    mlp_norm: Tensor
    gate_up: Linears
    down: Linears


@dataclass(frozen=True, slots=True)
class GpuNetwork:
    """The whole model on one device. embedding: [vocab, hidden] as stored. cos, sin: fp32 [positions, head_dim / 2]."""

    config: ModelConfig
    embedding: Tensor
    layers: tuple[GpuLayer, ...]
    final_norm: Tensor
    head: Linears
    cos: Tensor
    sin: Tensor

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_slots: Tensor,
        lanes: LaneTable,
        gather_rows: Tensor,
        kv: DeviceKV,
        buffers: Activations,
        scratch: Scratch,
    ) -> Tensor:
        """Launches all rows' work: their keys and values go to the cache, the logits of `gather_rows` are returned, a view of the buffers.

        token_ids, positions: int32 [rows]. kv_slots: int64 [rows], negative: nothing is stored. gather_rows: int32 [samples], rows of the
        round. -> fp32 [samples, vocab].
        """
        rows, samples = token_ids.shape[0], gather_rows.shape[0]
        stream = _Stream(buffers, buffers.rows, rows)
        gather(token_ids, self.embedding, stream.residual)
        for index, layer in enumerate(self.layers):
            stream.normed_linear(layer.input_norm, self.config.norm_eps, layer.qkv, buffers.qkv[:rows], scratch)
            self._attend(layer, positions, kv_slots, lanes, kv.keys[index], kv.values[index], buffers, rows, scratch)
            mixed = buffers.attended[:rows].view(rows, -1)
            stream.added = _linear(mixed, layer.attention_out, buffers.added[:rows], buffers, scratch)
            stream.normed_linear(layer.mlp_norm, self.config.norm_eps, layer.gate_up, buffers.gate_up[:rows], scratch)
            stream.added = self._down(layer.down, buffers, rows, scratch)
        last = stream.take(gather_rows, samples)
        logits = buffers.logits[:samples]
        last.normed_linear(self.final_norm, self.config.norm_eps, self.head, logits, scratch)
        return logits[:, : self.config.vocab_size]

    def _attend(
        self,
        layer: GpuLayer,
        positions: Tensor,
        kv_slots: Tensor,
        lanes: LaneTable,
        keys: Tensor,
        values: Tensor,
        buffers: Activations,
        rows: int,
        scratch: Scratch,
    ) -> None:
        config = self.config
        q, k, v = _heads(buffers.qkv[:rows], layer.qkv.widths, config)
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        turned, eps = buffers.q[:rows], config.norm_eps
        # Keys and values go to the cache first: a row reads its own from there too, rounded as later rows will find it.
        norm_rotate_store(q, k, v, norms, eps, self.cos, self.sin, positions, kv_slots, turned, keys, values)
        paged_attention(
            turned,
            keys,
            values,
            lanes,
            scratch,
            scale=1.0 / math.sqrt(config.head_dim),
            out=buffers.attended[:rows],
        )

    def _down(self, down: Linears, buffers: Activations, rows: int, scratch: Scratch) -> Tensor:
        gate_up, added = buffers.gate_up[:rows], buffers.added[:rows]
        width = self.config.intermediate_size
        if isinstance(down, LinearGroup) and width == down.in_features:
            rotated = buffers.rotated_for(down, rows)
            silu_mul_rotate(gate_up, down.suh, rotated)
            return linear_rotated(rotated, down, scratch, added)
        # Columns between the true width and the padded one hold what the padding decodes to: nobody may read them.
        activated = buffers.activated[:rows]
        silu_mul(gate_up, activated)
        return _linear(activated[:, :width], down, added, buffers, scratch)


class _Stream:
    """The residual stream of some rows: a sum, and what is still to be added to it. Adding goes to the other of two buffers and back."""

    def __init__(self, buffers: Activations, own: StreamBuffers, rows: int) -> None:
        self._buffers = buffers
        self._normed = own.normed[:rows]
        self.residual = own.first[:rows]  # fp32 [rows, hidden], without what is still to be added
        self._spare = own.second[:rows]
        self.added: Tensor | None = None

    def normed_linear(self, weight: Tensor, eps: float, group: Linears, out: Tensor, scratch: Scratch) -> None:
        """Adds what is to be added; out = the linears of the normed sum."""
        before, added, total = self.residual, None, None
        if self.added is not None:
            added, total = self.added[:, : before.shape[1]], self._spare
            self.residual, self._spare, self.added = total, before, None
        if isinstance(group, LinearGroup):
            rotated = self._buffers.rotated_for(group, before.shape[0])
            add_norm_rotate(before, added, weight, eps, group.suh, total=total, rotated=rotated)
            linear_rotated(rotated, group, scratch, out)
        else:
            add_norm_rotate(before, added, weight, eps, None, total=total, normed=self._normed)
            dense_linear(self._normed, group, out)

    def take(self, rows: Tensor, count: int) -> "_Stream":
        """A stream of these rows alone, in buffers of their own."""
        assert self.added is not None
        last = _Stream(self._buffers, self._buffers.samples, count)
        gather(rows, self.residual, last.residual)
        added = self._buffers.sampled_added[:count]
        gather(rows, self.added, added)
        last.added = added
        return last


def _linear(x: Tensor, group: Linears, out: Tensor, buffers: Activations, scratch: Scratch) -> Tensor:
    """out = the linears of x, fp32 [rows, width]."""
    if isinstance(group, LinearGroup):
        return exl3_linear(x, group, scratch, out=out, rotated=buffers.rotated)
    dense_linear(x, group, out)
    return out


def _heads(qkv: Tensor, widths: tuple[int, ...], config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as [rows, heads, head_dim]: views of the linears' padded outputs."""
    rows, size = qkv.shape[0], config.head_dim
    parts = torch.split(qkv, list(widths), dim=1)
    counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    q, k, v = (part[:, : n * size].view(rows, n, size) for part, n in zip(parts, counts, strict=True))
    return q, k, v
