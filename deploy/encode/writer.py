"""Encoded linears and the source's plain tensors -> a checkpoint folder as exl3-format 1.1 lays it out."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from espalier import __version__
from espalier.deploy.encode.recipe import PLAIN_HEAD_BITS, Recipe
from espalier.deploy.encode.source import Source
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import Exl3Tensors, rate_of_words
from espalier.replicas.errors import CheckpointError
from espalier.replicas.model.config import read_json

_SHARD_BYTES = 4 << 30
_STORED_DTYPES = (torch.float16, torch.bfloat16)
_MULTIPLIERS = {Codebook.MUL1: "mul1_multiplier", Codebook.MCG: "mcg_multiplier"}


def linear_tensors(key: str, encoded: Exl3Tensors, bias: Tensor | None) -> dict[str, Tensor]:
    """The tensors of one encoded linear by their names in the checkpoint; the bias [out] is padded as the columns are."""
    tensors = {f"{key}.trellis": encoded.trellis, f"{key}.suh": encoded.suh, f"{key}.svh": encoded.svh}
    if (marker := encoded.codebook.marker) is not None:
        tensors[f"{key}.{encoded.codebook}"] = torch.tensor(marker, dtype=torch.int32)
    if bias is not None:
        padded = torch.zeros(encoded.out_features, dtype=torch.float16)
        padded[: len(bias)] = bias.half()
        tensors[f"{key}.bias"] = padded
    return tensors


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """All of them or no file of that name, whenever the process may be killed."""
    unfinished = file.with_name(file.name + ".tmp")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)
    unfinished.replace(file)


def write_checkpoint(folder: Path, source: Source, recipe: Recipe, linear_files: Mapping[str, Path]) -> None:
    """Fill `folder`, which must be empty. linear_files: each encoded linear's key -> the file with its tensors."""
    for file in source.files():
        shutil.copyfile(file, folder / file.name)
    config = read_json(folder / "config.json")
    quantization: dict[str, Any] = {
        "quant_method": "exl3",
        "version": __version__,
        "bits": recipe.bits,
        "head_bits": int(recipe.head_bits) if recipe.head_bits == int(recipe.head_bits) else recipe.head_bits,
        "calibration": {"rows": 0, "cols": 0},
        "out_scales": "always",
        "codebook": recipe.codebook,
    }
    config["quantization_config"] = quantization
    config["tie_word_embeddings"] = source.head_is_tied and recipe.head_bits == PLAIN_HEAD_BITS
    _write_json(folder / "config.json", config)
    storage: dict[str, Any] = {}
    _write_shards(folder, _tensors(source, recipe, linear_files), storage)
    _write_json(folder / "quantization_config.json", quantization | {"tensor_storage": storage})
    recipe.write(folder)


def _tensors(
    source: Source, recipe: Recipe, linear_files: Mapping[str, Path]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Each module's key and tensors, in the order of computation."""
    spec = source.spec

    def plain(name: str) -> tuple[str, dict[str, Tensor]]:
        return name.rpartition(".")[0], {name: _as_stored(name, source.read(name))}

    def encoded(key: str) -> tuple[str, dict[str, Tensor]]:
        with safe_open(linear_files[key], framework="pt") as file:
            return key, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    yield plain(spec.embedding)
    for layer in spec.layers:
        yield from (plain(vector.name) for vector in layer.vectors)
        yield from (encoded(linear.key) for linear in layer.linears)
    yield plain(spec.final_norm.name)
    if recipe.head_bits != PLAIN_HEAD_BITS:
        yield encoded(spec.head.key)
    elif not source.head_is_tied:
        yield plain(f"{spec.head.key}.weight")


def _as_stored(name: str, tensor: Tensor) -> Tensor:
    stored = tensor if tensor.dtype in _STORED_DTYPES else tensor.half()
    if not bool(stored.isfinite().all()):
        raise CheckpointError(f"{name}: holds values that are not finite in fp16")
    return stored


def _write_shards(folder: Path, modules: Iterator[tuple[str, dict[str, Tensor]]], storage: dict[str, Any]) -> None:
    """Write one file, or several with an index; describe every module in `storage`."""
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    pending_bytes = 0

    def flush() -> None:
        write_tensors(folder / f"shard-{len(shards)}", pending)
        shards.append(list(pending))
        pending.clear()

    for key, tensors in modules:
        storage[key] = _storage(key, tensors)
        num_bytes = _num_bytes(tensors)
        if pending and pending_bytes + num_bytes > _SHARD_BYTES:
            flush()
            pending_bytes = 0
        pending.update(tensors)
        pending_bytes += num_bytes
    flush()
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{i}").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    total = sum(entry["n_bytes"] for module in storage.values() for entry in module["stored_tensors"].values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _storage(key: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "stored_tensors": {
            name: {"shape": list(tensor.shape), "n_bytes": _num_bytes({name: tensor}), "dtype": str(tensor.dtype)}
            for name, tensor in tensors.items()
        }
    }
    if (trellis := tensors.get(f"{key}.trellis")) is not None:
        rate = rate_of_words(int(trellis.shape[-1]))
        described |= {"quant_format": "exl3", "bits_per_weight": int(rate) if rate == int(rate) else rate}
        for codebook, name in _MULTIPLIERS.items():
            if f"{key}.{codebook}" in tensors and codebook.marker is not None:
                described[name] = codebook.marker & 0xFFFFFFFF
    return described


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
