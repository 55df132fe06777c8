"""Which weights these are, and whether they still are what they were when this folder was first loaded.

Every tensor the network uses is checksummed at each load (about 1 GB/s a core). The sums name the weights, and are compared with a record made
at the first load, so that a flipped byte is an error instead of another model. Knows no decoding.
"""

import hashlib
import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from espalier.replicas.cpus import usable_cpus
from espalier.replicas.errors import CheckpointError, InvalidRequestError
from espalier.replicas.model.checkpoint import Checkpoint
from espalier.replicas.model.headers import TensorEntry

_THREADS = 8


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """folder_id: this folder with these headers and this config, whatever the weights. weights_id: these weights, wherever they lie."""

    folder_id: str
    weights_id: str
    crc32: dict[str, int]


def fingerprint(checkpoint: Checkpoint) -> Fingerprint:
    """Reads every needed tensor once, several at a time."""
    needed = checkpoint.needed()
    with ThreadPoolExecutor(min(_THREADS, usable_cpus())) as threads:
        sums = threads.map(_crc32, needed)
        crc32 = {entry.name: crc for entry, crc in zip(needed, sums, strict=True)}
    described = hashlib.sha256((checkpoint.path / "config.json").read_bytes())
    for header in checkpoint.headers:
        described.update(header.raw)
    folder_id = described.copy()
    folder_id.update(str(checkpoint.path.resolve()).encode())
    described.update(json.dumps(crc32, sort_keys=True).encode())
    return Fingerprint(folder_id.hexdigest()[:16], described.hexdigest()[:16], crc32)


def _crc32(entry: TensorEntry) -> int:
    return zlib.crc32(entry.bytes().data) if entry.end > entry.begin else 0


def check_record(checkpoint: Checkpoint, found: Fingerprint, cache_dir: Path) -> None:
    """Compare with the record of the first load, or make it. Raises CheckpointError naming the tensor that changed."""
    file = cache_dir / "records" / f"weights-{found.folder_id}.json"
    if not file.exists():
        write_atomically(file, json.dumps({"path": str(checkpoint.path.resolve()), "crc32": found.crc32}, indent=1))
        return
    try:
        recorded = json.loads(file.read_text(encoding="utf-8"))["crc32"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise CheckpointError(f"{file}: record of the first load cannot be read; delete it to make a new one") from e
    for name, crc in found.crc32.items():
        if recorded.get(name) != crc:
            raise checkpoint.entry(name).error(
                f"its bytes are not those of the first load (crc32 {crc:08x}). If the change is meant, delete {file}"
            )


def write_atomically(file: Path, text: str) -> None:
    """Write a small file whole or not at all. Raises InvalidRequestError when the folder cannot be written."""
    unfinished = file.with_suffix(f".{os.getpid()}.unfinished")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, file)
    except OSError as e:
        raise InvalidRequestError(f"cache_dir: {file} cannot be written: {e.strerror}", param="cache_dir") from e
