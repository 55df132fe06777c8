"""Checkpoint -> Decoder: decodes and packs every linear, through the cache of decoded weights. Knows both sides, computes no rows."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from espalier.kernels.exl3.reference import effective_weight
from espalier.kernels.linear.blocked import COLUMN_BLOCK, num_column_blocks, pack_columns
from espalier.kernels.rope.frequencies import inverse_frequencies
from espalier.kernels.rope.reference import rope_table
from espalier.replicas.model.checkpoint import Checkpoint
from espalier.replicas.model.decoded_cache import open_decoded
from espalier.replicas.model.decoder import Decoder, DecoderLayer
from espalier.replicas.model.families import LinearSpec, VectorSpec
from espalier.replicas.model.fingerprint import Fingerprint
from espalier.replicas.model.headers import DTYPES
from espalier.replicas.model.linear import Embedding, PackedLinear


def load_decoder(
    checkpoint: Checkpoint, identity: Fingerprint, cache_dir: Path, max_context: int
) -> tuple[Decoder, int]:
    """Decode, or map what was decoded before, and put the network together for positions 0 .. max_context - 1.

    -> the network, and the crc32 of its decoded weights.
    """
    spec, config = checkpoint.spec, checkpoint.config
    groups: dict[str, tuple[LinearSpec, ...]] = {}
    for layer in spec.layers:
        for group in (layer.qkv, (layer.attention_out,), layer.gate_up, (layer.down,)):
            groups[group[0].key] = group
    groups[spec.head.key] = (spec.head,)

    def fill(name: str, out: Tensor) -> None:
        block = 0
        for linear in groups[name]:
            blocks = num_column_blocks(linear.out_features)
            pack_columns(_matrix(checkpoint, linear), out[block : block + blocks])
            block += blocks

    shapes = {name: _packed_shape(group) for name, group in groups.items()}
    decoded = open_decoded(cache_dir / "decoded", identity.folder_id, identity.weights_id, shapes, fill)

    def linear(*group: LinearSpec) -> PackedLinear:
        weight = decoded.arrays[group[0].key]
        return PackedLinear(weight, _packed_bias(checkpoint, group), tuple(spec.out_features for spec in group))

    layers = tuple(
        DecoderLayer(
            input_norm=_vector(checkpoint, layer.input_norm),
            qkv=linear(*layer.qkv),
            q_norm=None if layer.q_norm is None else _vector(checkpoint, layer.q_norm),
            k_norm=None if layer.k_norm is None else _vector(checkpoint, layer.k_norm),
            attention_out=linear(layer.attention_out),
            mlp_norm=_vector(checkpoint, layer.mlp_norm),
            gate_up=linear(*layer.gate_up),
            down=linear(layer.down),
        )
        for layer in spec.layers
    )
    cos, sin = rope_table(inverse_frequencies(config.rope, config.head_dim), max_context, config.rope.cos_sin_scale)
    decoder = Decoder(
        config=config,
        embedding=_embedding(checkpoint),
        layers=layers,
        final_norm=_vector(checkpoint, spec.final_norm),
        head=linear(spec.head),
        cos=cos,
        sin=sin,
    )
    return decoder, decoded.crc32


def _packed_shape(group: Sequence[LinearSpec]) -> tuple[int, int, int]:
    blocks = sum(num_column_blocks(linear.out_features) for linear in group)
    return blocks, group[0].in_features, COLUMN_BLOCK


def _matrix(checkpoint: Checkpoint, linear: LinearSpec) -> Tensor:
    """fp32 [in, out] in true widths. Rows beyond them would meet zeros only, columns beyond them nobody reads."""
    if checkpoint.is_quantized(linear.key):
        return effective_weight(checkpoint.exl3(linear.key))[: linear.in_features, : linear.out_features]
    tied = linear is checkpoint.spec.head and checkpoint.head_is_tied
    name = checkpoint.spec.embedding if tied else f"{linear.key}.weight"
    return checkpoint.entry(name).read().T


def _packed_bias(checkpoint: Checkpoint, group: Sequence[LinearSpec]) -> Tensor | None:
    present = [f"{linear.key}.bias" in checkpoint.entries for linear in group]
    if not any(present):
        return None
    parts = []
    for linear, has_bias in zip(group, present, strict=True):
        part = torch.zeros(num_column_blocks(linear.out_features) * COLUMN_BLOCK)
        if has_bias:
            part[: linear.out_features] = checkpoint.entry(f"{linear.key}.bias").read()[: linear.out_features]
        parts.append(part)
    return torch.cat(parts)


def _vector(checkpoint: Checkpoint, vector: VectorSpec) -> Tensor:
    return checkpoint.entry(vector.name).read().float()


def _embedding(checkpoint: Checkpoint) -> Embedding:
    entry = checkpoint.entry(checkpoint.spec.embedding)
    raw = torch.from_numpy(entry.bytes()).view(checkpoint.spec.vocab_size, -1)
    return Embedding(raw, DTYPES[entry.dtype])
