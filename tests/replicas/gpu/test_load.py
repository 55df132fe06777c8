"""The network that is loaded for kernels holds the numbers of the checkpoint: those that the CPU's loader sees, packed."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from espalier.kernels.exl3.pack import unpack_words
from espalier.kernels.exl3.reference import decode_inner
from espalier.kernels.linear.dense import DenseGroup
from espalier.kernels.linear.group import LinearGroup
from espalier.kernels.rope.frequencies import inverse_frequencies
from espalier.kernels.rope.reference import rope_table
from espalier.replicas.errors import CheckpointError
from espalier.replicas.gpu.load import load_network
from espalier.replicas.gpu.memory import network_bytes
from espalier.replicas.gpu.network import GpuNetwork, Linears
from espalier.replicas.model.checkpoint import Checkpoint, open_checkpoint
from espalier.replicas.model.families import LinearSpec
from tests.support.safetensors_edit import edit_tensors
from tests.support.tiny import make_tiny_checkpoint

CPU, META = torch.device("cpu"), torch.device("meta")
CONTEXT = 300
Q, K, V = (f"model.layers.0.self_attn.{name}_proj" for name in "qkv")

CASES: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama", "shards": 3},
    "biases, 3.5 bits": {"architecture": "qwen2", "bits": 3.5, "codebook": "mul1"},
    "head norms, mcg": {"architecture": "qwen3", "bits": 5, "codebook": "mcg"},
    "3inst, plain head": {"codebook": "3inst", "bits": 2, "head": "plain"},
    "padded widths": {"architecture": "qwen2", "hidden": 96, "intermediate": 160, "head_dim": 32, "vocab": 600},
    "plain": {"architecture": "qwen2", "quantized": False, "head": "plain", "hidden": 96, "head_dim": 32},
    "tied": {"quantized": False, "head": "tied"},
}


def loaded(folder: Path) -> tuple[Checkpoint, GpuNetwork]:
    checkpoint = open_checkpoint(folder)
    return checkpoint, load_network(checkpoint, CPU, CONTEXT)


def same(got: Tensor, want: Tensor) -> bool:
    return got.dtype == want.dtype and torch.equal(got, want)


def check_exl3(checkpoint: Checkpoint, members: tuple[LinearSpec, ...], group: Linears) -> None:
    assert isinstance(group, LinearGroup)
    originals = [checkpoint.exl3(member.key) for member in members]
    assert group.in_features == originals[0].in_features
    assert group.widths == tuple(original.out_features for original in originals)
    assert same(group.suh, torch.stack([original.suh for original in originals]))
    assert same(group.svh, torch.cat([original.svh for original in originals]))
    at = 0
    for original in originals:
        run = next(run for run in group.runs if run.first_column <= at < run.first_column + run.columns)
        assert (run.rate, run.codebook) == (original.rate, original.codebook)
        first = (at - run.first_column) // 16
        trellis = unpack_words(run.words)[:, first : first + original.out_features // 16].contiguous()
        assert same(trellis, original.trellis)
        again = type(original)(trellis, original.suh, original.svh, run.codebook)
        assert same(decode_inner(again), decode_inner(original))
        at += original.out_features


def check_plain(checkpoint: Checkpoint, members: tuple[LinearSpec, ...], group: Linears) -> None:
    assert isinstance(group, DenseGroup)
    at = 0
    for member, width in zip(members, group.widths, strict=True):
        assert same(group.weight[at : at + member.out_features], checkpoint.entry(f"{member.key}.weight").read())
        at += width


def check_bias(checkpoint: Checkpoint, members: tuple[LinearSpec, ...], group: Linears) -> None:
    stored = [checkpoint.entries.get(f"{member.key}.bias") for member in members]
    assert (group.bias is None) == all(entry is None for entry in stored)
    if group.bias is None:
        return
    for part, member, entry in zip(group.bias.split(list(group.widths)), members, stored, strict=True):
        want = torch.zeros(len(part))
        if entry is not None:
            want[: member.out_features] = entry.read().float()[: member.out_features]
        assert same(part, want)


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_checkpoint_packed(case: str, tmp_path: Path) -> None:
    checkpoint, network = loaded(make_tiny_checkpoint(tmp_path, **CASES[case]))
    spec, config = checkpoint.spec, checkpoint.config
    assert network.config == config and len(network.layers) == len(spec.layers)
    assert same(network.embedding, checkpoint.entry(spec.embedding).read())
    for layer, made in zip(spec.layers, network.layers, strict=True):
        for members, group in (
            (layer.qkv, made.qkv),
            ((layer.attention_out,), made.attention_out),
            (layer.gate_up, made.gate_up),
            ((layer.down,), made.down),
        ):
            check = check_exl3 if checkpoint.is_quantized(members[0].key) else check_plain
            check(checkpoint, members, group)
            check_bias(checkpoint, members, group)
        norms = (made.input_norm, made.q_norm, made.k_norm, made.mlp_norm)
        for vector, norm in zip((layer.input_norm, layer.q_norm, layer.k_norm, layer.mlp_norm), norms, strict=True):
            assert (vector is None) == (norm is None)
            assert vector is None or norm is None or same(norm, checkpoint.entry(vector.name).read().float())
    assert same(network.final_norm, checkpoint.entry(spec.final_norm.name).read().float())
    if checkpoint.head_is_tied:
        assert isinstance(network.head, DenseGroup)
        assert network.head.weight.data_ptr() == network.embedding.data_ptr()
        assert network.head.bias is None
    else:
        check = check_exl3 if checkpoint.is_quantized(spec.head.key) else check_plain
        check(checkpoint, (spec.head,), network.head)
    cos, sin = rope_table(inverse_frequencies(config.rope, config.head_dim), CONTEXT, config.rope.cos_sin_scale)
    assert same(network.cos, cos) and same(network.sin, sin)
    # What it holds is what was foretold: nothing of what was read is kept beside it.
    assert network_bytes(network) == network_bytes(load_network(checkpoint, META, CONTEXT))


def test_a_group_of_several_rates(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        rows, columns, _ = tensors[f"{K}.trellis"].shape
        tensors[f"{K}.trellis"] = torch.randint(-32768, 32768, (rows, columns, 56)).short()

    edit_tensors(make_tiny_checkpoint(tmp_path, bits=4) / "model.safetensors", change)
    checkpoint, network = loaded(tmp_path)
    group = network.layers[0].qkv
    assert isinstance(group, LinearGroup) and [run.rate for run in group.runs] == [4.0, 3.5, 4.0]
    check_exl3(checkpoint, checkpoint.spec.layers[0].qkv, group)


def test_packed_signs(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for full, packed in (("suh", "su"), ("svh", "sv")):
            size = len(tensors.pop(f"{Q}.{full}"))
            tensors[f"{Q}.{packed}"] = torch.randint(-32768, 32768, (size // 16,)).short()

    edit_tensors(make_tiny_checkpoint(tmp_path) / "model.safetensors", change)
    checkpoint, network = loaded(tmp_path)
    group = network.layers[0].qkv
    assert set(group.suh[0].tolist()) == {-1.0, 1.0}
    check_exl3(checkpoint, checkpoint.spec.layers[0].qkv, group)
    assert network_bytes(network) == network_bytes(load_network(checkpoint, META, CONTEXT))


def test_vectors_that_are_fp32_already_keep_nothing_else(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("norm.weight", ".bias"))]:
            tensors[name] = tensors[name].float()

    edit_tensors(make_tiny_checkpoint(tmp_path, architecture="qwen2") / "model.safetensors", change)
    checkpoint, network = loaded(tmp_path)
    norm = network.layers[0].input_norm
    assert same(norm, checkpoint.entry("model.layers.0.input_layernorm.weight").read())
    assert norm.untyped_storage().nbytes() == norm.nbytes
    assert network_bytes(network) == network_bytes(load_network(checkpoint, META, CONTEXT))


def test_a_partly_quantized_group_is_refused_by_both_names(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        trellis = tensors[f"{V}.trellis"]
        shape = (trellis.shape[1] * 16, trellis.shape[0] * 16)
        for part in ("trellis", "suh", "svh", "mul1"):
            del tensors[f"{V}.{part}"]
        tensors[f"{V}.weight"] = torch.zeros(shape, dtype=torch.float16)

    edit_tensors(make_tiny_checkpoint(tmp_path) / "model.safetensors", change)
    for device in (CPU, META):
        with pytest.raises(CheckpointError) as caught:
            load_network(open_checkpoint(tmp_path), device, CONTEXT)
        for word in (str(tmp_path / "model.safetensors"), f"{V}.weight", f"{Q}.trellis"):
            assert word in caught.value.message


def test_plain_linears_of_several_types_are_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{K}.weight"] = tensors[f"{K}.weight"].bfloat16()

    edit_tensors(make_tiny_checkpoint(tmp_path, quantized=False) / "model.safetensors", change)
    with pytest.raises(CheckpointError, match=rf"{K}\.weight: is BF16, and {Q}\.weight.* is F16"):
        load_network(open_checkpoint(tmp_path), CPU, CONTEXT)


def test_a_file_cut_short_after_it_was_opened(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny_checkpoint(tmp_path, shards=2))
    last = max(checkpoint.needed(), key=lambda entry: (entry.file.name, entry.end))
    os.truncate(last.file, last.end - 2)
    with pytest.raises(CheckpointError) as caught:
        load_network(checkpoint, CPU, CONTEXT)
    assert str(last.file) in caught.value.message and last.name in caught.value.message


def test_a_real_checkpoint_has_the_size_that_was_foretold(shared: Path) -> None:
    checkpoint = open_checkpoint(shared / "models" / "smollm2-135m-instruct-exl3-4.0bpw")
    foretold = network_bytes(load_network(checkpoint, META, 8192))
    assert foretold == network_bytes(load_network(checkpoint, CPU, 8192))
