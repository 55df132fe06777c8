"""From a tokenizer's pieces (the strings its vocabulary holds) to the bytes they stand for.

Two families are known, which cover what is served here: byte-level BPE, whose pieces spell bytes as printable characters, and
SentencePiece-like ones, whose pieces are text with a mark for the space, and <0xNN> for single bytes. Knows no files and no ids.
"""

import re
from collections.abc import Callable
from typing import Any

PieceBytes = Callable[[str], bytes]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def piece_decoder(decoder: dict[str, Any] | None) -> PieceBytes:
    """The function that decodes a piece inside a text. decoder: that section of tokenizer.json.

    What a decoder does at the very start of a text only (dropping the space that the encoder put there) is no property of a piece and is left
    out. Raises ValueError, naming the step, for a decoder of another family.
    """
    steps = _flatten(decoder)
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        _refuse_others(kinds, {"ByteLevel", "Fuse"})
        return _byte_level
    _refuse_others(kinds, {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})
    if not kinds:
        raise ValueError("it has no decoder")
    return _text_like(_replacements(steps), byte_fallback="ByteFallback" in kinds)


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _flatten(inner)]
    return [decoder]


def _refuse_others(kinds: list[Any], known: set[str]) -> None:
    for kind in kinds:
        if kind not in known:
            raise ValueError(f"its decoder has a step {kind!r}, which is not known here")


def _replacements(steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(piece text, text it stands for), in order."""
    replacements = []
    for step in steps:
        if step["type"] == "Metaspace":
            replacements.append((str(step.get("replacement", "▁")), " "))
        elif step["type"] == "Replace":
            pattern = step.get("pattern")
            if not isinstance(pattern, dict) or not isinstance(pattern.get("String"), str):
                raise ValueError("its decoder replaces by a regular expression, which is not known here")
            replacements.append((pattern["String"], str(step.get("content", ""))))
    return replacements


def _text_like(replacements: list[tuple[str, str]], *, byte_fallback: bool) -> PieceBytes:
    def decode(piece: str) -> bytes:
        for old, new in replacements:
            piece = piece.replace(old, new)
        if byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return piece.encode()

    return decode


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in piece)
    except KeyError:
        return piece.encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the other bytes in order for the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
