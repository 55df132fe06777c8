"""Kubernetes' protobuf encoding, as far as Helm sends it: bytes -> a Secret or ConfigMap as JSON has it. Helm keeps releases in these."""

import base64
from collections.abc import Iterator
from typing import Any

MAGIC = b"k8s\0"
WIDTHS = {1: 8, 5: 4}


def decode_object(body: bytes) -> dict[str, Any]:
    """An envelope runtime.Unknown with one Secret or ConfigMap in it. Raises ValueError for other kinds."""
    envelope = dict(_fields(body.removeprefix(MAGIC)))
    kind_fields = dict(_fields(envelope[1]))
    kind = kind_fields[2].decode()
    if kind not in ("Secret", "ConfigMap"):
        raise ValueError(f"{kind} in protobuf")
    manifest: dict[str, Any] = {"apiVersion": kind_fields[1].decode(), "kind": kind, "metadata": {}}
    for number, value in _fields(envelope[2]):
        if number == 1:
            manifest["metadata"] = _metadata(value)
        elif number == 2:
            key, item = _pair(value)
            text = base64.b64encode(item).decode() if kind == "Secret" else item.decode()
            manifest.setdefault("data", {})[key] = text
        elif number == 3 and kind == "Secret":
            manifest["type"] = value.decode()
    return manifest


def _metadata(body: bytes) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for number, value in _fields(body):
        if number in (1, 3) and value:
            metadata["name" if number == 1 else "namespace"] = value.decode()
        elif number == 11:
            key, item = _pair(value)
            metadata.setdefault("labels", {})[key] = item.decode()
    return metadata


def _pair(body: bytes) -> tuple[str, bytes]:
    entry = dict(_fields(body))
    return entry[1].decode(), entry.get(2, b"")


def _fields(body: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field; lengths of fixed-width ones are known, their values are not read."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = body[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(body):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
            continue
        length = varint() if wire == 2 else WIDTHS[wire]
        at += length
        yield number, body[at - length : at]
