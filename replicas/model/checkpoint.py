"""A checkpoint folder -> its tensors by name. Everything that headers can tell is checked before any weight is read.

`open_checkpoint` checks the files among themselves, `Checkpoint.check` the tensors a network needs against its true widths. Only marker
scalars are read for that. Knows the EXL3 group of a linear; which linears there are is `families.py`'s.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import BLOCK, TILE, Exl3Tensors, check_trellis, unpack_signs
from espalier.replicas.errors import CheckpointError
from espalier.replicas.model.config import ModelConfig, read_json
from espalier.replicas.model.families import LinearSpec, NetworkSpec, network_spec
from espalier.replicas.model.headers import DTYPES, FileHeader, TensorEntry, read_header

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_SHARD_NAME = re.compile(r"model-\d+-of-\d+\.safetensors")
_PLAIN_DTYPES = ("F16", "BF16", "F32")
# Parts of an EXL3 group; `.bias` belongs to plain linears too.
_GROUP_PARTS = ("trellis", "suh", "svh", "su", "sv", "mcg", "mul1")
# Left by old exporters; recomputed from the config.
_HARMLESS = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder whose headers are sound. entries: every tensor by name. headers: files in name order."""

    path: Path
    config: ModelConfig
    spec: NetworkSpec
    entries: dict[str, TensorEntry]
    headers: tuple[FileHeader, ...]

    def entry(self, name: str) -> TensorEntry:
        """CheckpointError if the checkpoint lacks it."""
        if name not in self.entries:
            raise CheckpointError(f"{self.path}: {name}: tensor is missing")
        return self.entries[name]

    def is_quantized(self, key: str) -> bool:
        """Whether the linear of that key is an EXL3 group."""
        return f"{key}.trellis" in self.entries

    @property
    def head_is_tied(self) -> bool:
        """Whether the embedding table serves as the head: only when it may and no head is stored."""
        key = self.spec.head.key
        return self.spec.head_may_be_tied and not self.is_quantized(key) and f"{key}.weight" not in self.entries

    def needed(self) -> list[TensorEntry]:
        """Every tensor the network is made of, in order of computation."""
        spec = self.spec
        names = [spec.embedding]
        for layer in spec.layers:
            names += [vector.name for vector in layer.vectors]
            for linear in layer.linears:
                names += self._linear_names(linear.key)
        names.append(spec.final_norm.name)
        if not self.head_is_tied:
            names += self._linear_names(spec.head.key)
        return [self.entry(name) for name in names]

    def exl3(self, key: str) -> Exl3Tensors:
        """Reads the EXL3 group of a checked linear."""

        def scales(full: str, packed: str) -> Tensor:
            name = f"{key}.{full}"
            return (
                self.entries[name].read()
                if name in self.entries
                else unpack_signs(self.entry(f"{key}.{packed}").read())
            )

        return Exl3Tensors(
            self.entry(f"{key}.trellis").read(), scales("suh", "su"), scales("svh", "sv"), self._codebook(key)
        )

    def _linear_names(self, key: str) -> list[str]:
        parts = (*_GROUP_PARTS, "bias") if self.is_quantized(key) else ("weight", "bias")
        present = [f"{key}.{part}" for part in parts if f"{key}.{part}" in self.entries]
        return present or [f"{key}.weight"]

    def check(self) -> None:
        """Every tensor the network needs is here, with a dtype and shape that fit the config. Raises CheckpointError."""
        spec = self.spec
        table = self.entry(spec.embedding) if spec.embedding in self.entries else None
        if table is None:
            stem = spec.embedding.removesuffix(".weight")
            if self.is_quantized(stem):
                raise self.entry(f"{stem}.trellis").error("quantized embedding tables are not served")
            raise CheckpointError(f"{self.path}: {spec.embedding}: tensor is missing")
        _check_plain(table, (spec.vocab_size, spec.hidden_size))
        for layer in spec.layers:
            for vector in layer.vectors:
                _check_plain(self.entry(vector.name), (vector.size,))
            for linear in layer.linears:
                self._check_linear(linear)
            self._refuse_unknown_parts(layer.prefix, layer.linears, [vector.name for vector in layer.vectors])
        _check_plain(self.entry(spec.final_norm.name), (spec.final_norm.size,))
        if not self.head_is_tied:
            self._check_linear(spec.head)

    def _check_linear(self, linear: LinearSpec) -> None:
        key = linear.key
        quantized, weight = self.is_quantized(key), self.entries.get(f"{key}.weight")
        if quantized and weight is not None:
            raise weight.error(f"stands beside {key}.trellis: which of the two is meant?")
        if quantized:
            self._check_group(linear)
        else:
            for part in _GROUP_PARTS:
                if f"{key}.{part}" in self.entries:
                    raise self.entries[f"{key}.{part}"].error(f"has no {key}.trellis beside it")
            _check_plain(self.entry(f"{key}.weight"), (linear.out_features, linear.in_features))
        if f"{key}.bias" in self.entries:
            bias = self.entries[f"{key}.bias"]
            size = (
                _padded(linear.out_features)
                if quantized and bias.shape != (linear.out_features,)
                else linear.out_features
            )
            _check_plain(bias, (size,))

    def _check_group(self, linear: LinearSpec) -> None:
        key, trellis = linear.key, self.entries[f"{linear.key}.trellis"]
        if trellis.dtype not in DTYPES:
            raise trellis.error(f"trellis must be I16, is {trellis.dtype}")
        try:
            check_trellis(trellis.shape, DTYPES[trellis.dtype], self._codebook(key))
        except ValueError as e:
            raise trellis.error(str(e)) from e
        widths = {"in": _padded(linear.in_features), "out": _padded(linear.out_features)}
        stored = {"in": trellis.shape[0] * TILE, "out": trellis.shape[1] * TILE}
        for side in ("in", "out"):
            if stored[side] != widths[side]:
                raise trellis.error(
                    f"{side} width is {stored[side]}; config.json asks for {widths[side]} ({getattr(linear, side + '_features')} padded to {BLOCK})"
                )
        for full, packed, side in (("suh", "su", "in"), ("svh", "sv", "out")):
            vector, signs = self.entries.get(f"{key}.{full}"), self.entries.get(f"{key}.{packed}")
            if vector is not None and signs is not None:
                raise signs.error(f"stands beside {key}.{full}: only one of the two may exist")
            if vector is not None:
                _expect(vector, ("F16",), (stored[side],))
            elif signs is not None:
                _expect(signs, ("I16",), (stored[side] // 16,))
            else:
                raise trellis.error(f"has neither {key}.{full} nor {key}.{packed} beside it")

    def _codebook(self, key: str) -> Codebook:
        markers = {
            book: self.entries[f"{key}.{book}"]
            for book in (Codebook.MCG, Codebook.MUL1)
            if f"{key}.{book}" in self.entries
        }
        if len(markers) > 1:
            raise markers[Codebook.MUL1].error(f"stands beside {key}.mcg: a linear has one codebook")
        for book, entry in markers.items():
            if entry.dtype != "I32" or entry.shape not in ((), (1,)):
                raise entry.error(f"marker must be I32 [], is {entry.dtype} {list(entry.shape)}")
            value = int(entry.read().item())
            if value != book.marker:
                raise entry.error(f"marker must be {book.marker}, is {value}")
            return book
        return Codebook.THREE_INST

    def _refuse_unknown_parts(self, prefix: str, linears: Iterable[LinearSpec], vectors: list[str]) -> None:
        known = {f"{linear.key}.{part}" for linear in linears for part in (*_GROUP_PARTS, "weight", "bias", "scale")}
        known.update(vectors)
        for name, entry in self.entries.items():
            if name.startswith(prefix) and name not in known and not _HARMLESS.search(name):
                raise entry.error(f"is not part of a {self.config.family} layer; leaving it out would change the model")


def open_checkpoint(path: Path) -> Checkpoint:
    """Check everything in `path` that can be told without reading weights. Raises CheckpointError naming file and tensor or key."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: is not a folder")
    config = ModelConfig.from_checkpoint(path)
    headers = _headers(path)
    entries: dict[str, TensorEntry] = {}
    for header in headers:
        for name, entry in header.entries.items():
            if name in entries:
                raise entry.error(f"is in {entries[name].file.name} too")
            entries[name] = entry
    checkpoint = Checkpoint(path, config, network_spec(config), entries, tuple(headers))
    checkpoint.check()
    return checkpoint


def _headers(path: Path) -> list[FileHeader]:
    index_file = path / INDEX_FILE
    if not index_file.exists():
        if not (path / SINGLE_FILE).exists():
            raise CheckpointError(f"{path}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
        return [read_header(path / SINGLE_FILE)]
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index_file}: weight_map must map tensor names to file names")
    files = sorted(set(weight_map.values()))
    for file in files:
        if Path(file).name != file:
            raise CheckpointError(f"{index_file}: weight_map: {file!r} is not a file name")
        if not (path / file).exists():
            raise CheckpointError(f"{path / file}: shard is missing, {INDEX_FILE} names it")
    for stray in sorted(file.name for file in path.iterdir() if _SHARD_NAME.fullmatch(file.name)):
        if stray not in files:
            raise CheckpointError(f"{path / stray}: shard is not named by {INDEX_FILE}")
    headers = [read_header(path / file) for file in files]
    for header in headers:
        for name, entry in header.entries.items():
            if weight_map.get(name) != header.file.name:
                raise entry.error(f"{INDEX_FILE} does not say that it is here")
        for name, file in weight_map.items():
            if file == header.file.name and name not in header.entries:
                raise CheckpointError(f"{header.file}: {name}: {INDEX_FILE} says that it is here, it is not")
    return headers


def _check_plain(entry: TensorEntry, shape: tuple[int, ...]) -> None:
    _expect(entry, _PLAIN_DTYPES, shape)


def _expect(entry: TensorEntry, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    if entry.dtype not in dtypes:
        raise entry.error(f"dtype must be {' or '.join(dtypes)}, is {entry.dtype}")
    if entry.shape != shape:
        raise entry.error(f"shape must be {list(shape)}, is {list(entry.shape)}")


def _padded(width: int) -> int:
    return -(-width // BLOCK) * BLOCK
