"""Random modules -> a checkpoint folder as exl3-format 1.1 lays it out. Sizes are known beforehand, so threads write all places at once."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from espalier import __version__
from espalier.deploy.random_model.shapes import SHAPES
from espalier.deploy.random_model.tensors import PIECE_BYTES, PLAIN_BITS, RandomModule, RandomTensor, random_modules
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import RATES
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.model.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, open_checkpoint
from espalier.replicas.model.config import ModelConfig
from espalier.replicas.model.families import network_spec

SHARD_BYTES = 4 << 30  # of a file's tensors
_TORCH_DTYPES = {"F16": "torch.float16", "I16": "torch.int16", "I32": "torch.int32"}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


def write_random_model(
    out: Path,
    shape: str,
    *,
    bits: float = 4.0,
    head_bits: float = 6.0,
    codebook: str = "mul1",
    layers: int | None = None,
    seed: int = 0,
    tokenizer_from: Path | None = None,
    threads: int | None = None,
) -> Checkpoint:
    """A checkpoint of that shape with random weights in the new folder `out`, the same bytes for the same arguments.

    shape: a name of SHAPES. layers: instead of the shape's own. bits, head_bits: rates; head_bits 16 is a plain head. tokenizer_from: a
    folder whose tokenizer's files are copied, without which the checkpoint has none. threads: None takes all cores.
    Raises InvalidRequestError naming the option.
    """
    _check(shape, bits, head_bits, codebook, layers, seed, tokenizer_from, threads)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InvalidRequestError(f"out: {out} exists and holds something else; name a new folder", param="out")
    chosen = SHAPES[shape] if layers is None else replace(SHAPES[shape], num_layers=layers)
    quantization = _quantization(bits, head_bits, codebook)
    work = out.with_name(out.name + ".partial")
    try:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        if tokenizer_from is not None:
            for file in (tokenizer_from / name for name in _TOKENIZER_FILES):
                if file.exists():
                    shutil.copyfile(file, work / file.name)
        _write_json(work / "config.json", chosen.config() | {"quantization_config": quantization})
        spec = network_spec(ModelConfig.from_checkpoint(work))
        modules = random_modules(spec, bits, head_bits, Codebook(codebook))
        storage = {module.key: _storage(module, Codebook(codebook)) for module in modules}
        _write_json(work / "quantization_config.json", quantization | {"tensor_storage": storage})
        _write_tensors(work, modules, seed, threads or len(os.sched_getaffinity(0)))
        work.replace(out)
    except OSError as e:
        raise InvalidRequestError(f"out: {out} cannot be written: {e.strerror}", param="out") from e
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return open_checkpoint(out)


def _check(
    shape: str,
    bits: float,
    head_bits: float,
    codebook: str,
    layers: int | None,
    seed: int,
    tokenizer_from: Path | None,
    threads: int | None,
) -> None:
    def require(ok: bool, name: str, message: str) -> None:
        if not ok:
            raise InvalidRequestError(f"{name}: {message}", param=name)

    require(shape in SHAPES, "shape", f"must be one of {', '.join(SHAPES)}, is {shape!r}")
    require(codebook in tuple(Codebook), "codebook", f"must be one of {', '.join(Codebook)}, is {codebook!r}")
    rates = [rate for rate in RATES if rate == int(rate) or Codebook(codebook).allows_half_rates]
    for name, rate, possible in (("bits", bits, rates), ("head_bits", head_bits, [*rates, PLAIN_BITS])):
        listed = ", ".join(f"{r:g}" for r in possible)
        require(rate in possible, name, f"must be one of {listed} with codebook {codebook}, is {rate:g}")
    for name, count in (("layers", layers), ("threads", threads)):
        require(count is None or count >= 1, name, f"must be at least 1, is {count}")
    require(seed >= 0, "seed", f"must be at least 0, is {seed}")
    if tokenizer_from is not None:
        file = tokenizer_from / "tokenizer.json"
        require(file.is_file(), "tokenizer_from", f"there is no {file}")


def _quantization(bits: float, head_bits: float, codebook: str) -> dict[str, Any]:
    return {
        "quant_method": "exl3",
        "version": __version__,
        "bits": float(bits),
        "head_bits": _short(head_bits),
        "calibration": {"rows": 0, "cols": 0},
        "out_scales": "always",
        "codebook": codebook,
    }


def _storage(module: RandomModule, codebook: Codebook) -> dict[str, Any]:
    described: dict[str, Any] = {
        "stored_tensors": {
            tensor.name: {
                "shape": list(tensor.shape),
                "n_bytes": tensor.num_bytes,
                "dtype": _TORCH_DTYPES[tensor.dtype],
            }
            for tensor in module.tensors
        }
    }
    if module.bits is not None:
        described |= {"quant_format": "exl3", "bits_per_weight": _short(module.bits)}
        if codebook.marker is not None:
            described[f"{codebook}_multiplier"] = codebook.marker & 0xFFFFFFFF
    return described


def _write_tensors(folder: Path, modules: Sequence[RandomModule], seed: int, threads: int) -> None:
    shards = _shards([tensor for module in modules for tensor in module.tensors])
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [SINGLE_FILE]
    else:
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        total = sum(tensor.num_bytes for shard in shards for tensor in shard)
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    with ThreadPoolExecutor(threads) as pool:
        for name, shard in zip(names, shards, strict=True):
            _write_shard(folder / name, shard, seed, pool)


def _shards(tensors: Sequence[RandomTensor]) -> list[list[RandomTensor]]:
    shards: list[list[RandomTensor]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.num_bytes > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    return shards


def _write_shard(file: Path, tensors: Sequence[RandomTensor], seed: int, pool: ThreadPoolExecutor) -> None:
    """Header and tensors, one behind the other."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        places = [end, end + tensor.num_bytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": places}
        end = places[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.flush()
        start = stream.tell()
        os.posix_fallocate(stream.fileno(), 0, start + end)  # a full disk is an error here, before any work

        def write(tensor: RandomTensor, begin: int) -> None:
            left = tensor.piece(seed, begin).data
            at = start + header[tensor.name]["data_offsets"][0] + begin
            while left:
                count = os.pwrite(stream.fileno(), left, at)
                left, at = left[count:], at + count

        jobs = [
            pool.submit(write, tensor, begin) for tensor in tensors for begin in range(0, tensor.num_bytes, PIECE_BYTES)
        ]
        try:
            for job in as_completed(jobs):
                job.result()
        finally:
            for job in jobs:
                job.cancel()


def _short(number: float) -> float | int:
    return int(number) if number == int(number) else number


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
