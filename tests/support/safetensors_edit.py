"""Breaking a safetensors file on purpose: read it apart, change header or tensors, write it back without any check."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Header = dict[str, Any]


def split(file: Path) -> tuple[Header, bytes]:
    """(header, data)."""
    raw = file.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(file: Path, header: Header, data: bytes) -> None:
    """Written without padding, so tensors may land on any byte."""
    text = json.dumps(header, separators=(",", ":")).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def edit_header(file: Path, change: Callable[[Header], None]) -> None:
    """Change the header in place; the data stays."""
    header, data = split(file)
    change(header)
    join(file, header, data)


def edit_tensors(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors by name; the header follows."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, str(file))


def shift_data(file: Path, name: str, num_bytes: int) -> None:
    """Insert a hole before tensor `name`, so that it and all behind it move."""
    header, data = split(file)
    at = header[name]["data_offsets"][0]
    for key, entry in header.items():
        if key != "__metadata__" and entry["data_offsets"][0] >= at:
            entry["data_offsets"] = [offset + num_bytes for offset in entry["data_offsets"]]
    join(file, header, data[:at] + b"\xaa" * num_bytes + data[at:])
