"""Checkpoint -> GpuNetwork: tensors go to the device as they are stored and are packed there, one group of linears after the other.

Beside the network, the memory of one group's tensors is in use. Knows what a network is made of, not how files are read (`staging.py`).
"""

import contextlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import Exl3Tensors, unpack_signs
from espalier.kernels.linear.dense import pack_dense
from espalier.kernels.linear.group import pack_group
from espalier.kernels.rope.frequencies import inverse_frequencies
from espalier.kernels.rope.reference import rope_table
from espalier.replicas.gpu.network import GpuLayer, GpuNetwork, Linears
from espalier.replicas.gpu.staging import read_groups
from espalier.replicas.model.checkpoint import Checkpoint
from espalier.replicas.model.config import ModelConfig
from espalier.replicas.model.families import LayerSpec, LinearSpec, VectorSpec
from espalier.replicas.model.headers import TensorEntry
from espalier.replicas.model.vector_math import settle_vector_math

Group = Sequence[LinearSpec]
Tensors = Mapping[str, Tensor]


def load_network(checkpoint: Checkpoint, device: torch.device, max_context: int) -> GpuNetwork:
    """The network on `device`, with rotary tables for positions 0 .. max_context - 1. Ready for every stream of the device.

    device: a GPU, the CPU, or "meta", where nothing is read and tensors are shapes alone. A tied head shares the embedding's memory, where
    the vocabulary is a multiple of 128. Raises CheckpointError naming file and tensor: a file that cannot be read or ends early, or linears
    of one input that are partly EXL3, or plain ones of several types.
    """
    spec = checkpoint.spec
    # The head first: it is the largest, and while it is packed it is there more than once.
    groups: list[Group] = [] if checkpoint.head_is_tied else [(spec.head,)]
    groups += [group for layer in spec.layers for group in _groups(layer)]
    stored = [[checkpoint.entry(spec.embedding)], _vectors(checkpoint, groups)]
    stored += [_entries(checkpoint, group) for group in groups]
    with contextlib.closing(read_groups(stored, device)) as parts:
        embedding = next(parts)[spec.embedding]
        vectors = {name: vector.to(torch.float32, copy=True) for name, vector in next(parts).items()}
        packed = {group[0].key: _pack(checkpoint, group, next(parts), vectors) for group in groups}
    head = pack_dense([embedding], [None]) if checkpoint.head_is_tied else packed[spec.head.key]
    cos, sin = _rope_tables(checkpoint.config, max_context, device)
    layers = tuple(_layer(layer, packed, vectors) for layer in spec.layers)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what packing needed is free for others, and for allocations of other sizes
    return GpuNetwork(checkpoint.config, embedding, layers, vectors[spec.final_norm.name], head, cos, sin)


def _groups(layer: LayerSpec) -> tuple[Group, ...]:
    return layer.qkv, (layer.attention_out,), layer.gate_up, (layer.down,)


def _layer(layer: LayerSpec, packed: Mapping[str, Linears], vectors: Tensors) -> GpuLayer:
    def norm(vector: VectorSpec | None) -> Tensor | None:
        return None if vector is None else vectors[vector.name]

    return GpuLayer(
        input_norm=vectors[layer.input_norm.name],
        qkv=packed[layer.qkv[0].key],
        q_norm=norm(layer.q_norm),
        k_norm=norm(layer.k_norm),
        attention_out=packed[layer.attention_out.key],
        mlp_norm=vectors[layer.mlp_norm.name],
        gate_up=packed[layer.gate_up[0].key],
        down=packed[layer.down.key],
    )


def _vectors(checkpoint: Checkpoint, groups: Sequence[Group]) -> list[TensorEntry]:
    """Norm weights and biases: small, and fp32 on the device."""
    spec = checkpoint.spec
    names = [spec.final_norm.name, *(vector.name for layer in spec.layers for vector in layer.vectors)]
    names += [
        f"{linear.key}.bias" for group in groups for linear in group if f"{linear.key}.bias" in checkpoint.entries
    ]
    return [checkpoint.entry(name) for name in names]


def _entries(checkpoint: Checkpoint, group: Group) -> list[TensorEntry]:
    """The tensors of a group's linears, without biases. Raises CheckpointError for one that is partly EXL3, or of several types."""
    first = group[0].key
    is_exl3 = checkpoint.is_quantized(first)
    weights = [
        checkpoint.entry(f"{linear.key}.{'trellis' if checkpoint.is_quantized(linear.key) else 'weight'}")
        for linear in group
    ]
    for weight, linear in zip(weights, group, strict=True):
        if checkpoint.is_quantized(linear.key) != is_exl3:
            raise weight.error(f"is computed with {weights[0].name}: on a GPU both must be EXL3, or both plain")
        if weight.dtype != weights[0].dtype:
            raise weight.error(f"is {weight.dtype}, and {weights[0].name}, computed with it, is {weights[0].dtype}")
    if not is_exl3:
        return weights
    names = [f"{linear.key}.{part}" for linear in group for part in ("suh", "su", "svh", "sv")]
    return weights + [checkpoint.entries[name] for name in names if name in checkpoint.entries]


def _pack(checkpoint: Checkpoint, group: Group, tensors: Tensors, vectors: Tensors) -> Linears:
    biases = [vectors.get(f"{linear.key}.bias") for linear in group]
    if not checkpoint.is_quantized(group[0].key):
        return pack_dense([tensors[f"{linear.key}.weight"] for linear in group], biases)
    members = [_exl3(checkpoint, linear.key, tensors) for linear in group]
    return pack_group(members, [_padded(bias, member) for bias, member in zip(biases, members, strict=True)])


def _exl3(checkpoint: Checkpoint, key: str, tensors: Tensors) -> Exl3Tensors:
    def scales(full: str, packed: str) -> Tensor:
        if (stored := tensors.get(f"{key}.{full}")) is not None:
            return stored
        signs = tensors[f"{key}.{packed}"]
        with signs.device:  # where what unpacking makes should be, too
            return unpack_signs(signs)

    marked = (book for book in (Codebook.MCG, Codebook.MUL1) if f"{key}.{book}" in checkpoint.entries)
    codebook = next(marked, Codebook.THREE_INST)
    return Exl3Tensors(tensors[f"{key}.trellis"], scales("suh", "su"), scales("svh", "sv"), codebook)


def _padded(bias: Tensor | None, member: Exl3Tensors) -> Tensor | None:
    """Zeros behind a bias of the true width."""
    if bias is None or len(bias) == member.out_features:
        return bias
    return torch.nn.functional.pad(bias, (0, member.out_features - len(bias)))


def _rope_tables(config: ModelConfig, max_context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    if device.type == "meta":
        shape = (max_context, config.head_dim // 2)
        return torch.empty(shape, device=device), torch.empty(shape, device=device)
    # On the CPU whatever the device, so that the tables' bits are the same everywhere.
    settle_vector_math()
    cos, sin = rope_table(inverse_frequencies(config.rope, config.head_dim), max_context, config.rope.cos_sin_scale)
    return cos.to(device, copy=True), sin.to(device, copy=True)  # and no longer than asked for
