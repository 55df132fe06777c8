"""API keys: a file of `label: key` lines, read again whenever it changes. A file that cannot be trusted lets nobody in. Knows neither wire.

Trusted means: a regular file that group and others cannot touch (mode 0600 or stricter), at least one key, every line well formed. Where the
file is root's and we are not, its group may read it: so a Secret reaches a pod.
"""

import hashlib
import hmac
import logging
import os
import re
import stat
from pathlib import Path

from espalier.cluster.call import ANONYMOUS
from espalier.cluster.ingress.errors import UnauthenticatedError

log = logging.getLogger(__name__)
_LINE = re.compile(r"(?P<label>[A-Za-z0-9._@-]{1,64})\s*:\s*(?P<key>[!-~]+)")

# What of a file's status tells that it was written, replaced or given another mode: mtime, ctime, size, inode, mode.
_Signature = tuple[int, int, int, int, int]


class KeyFileError(ValueError):
    """The key file cannot be trusted; the message says why, with the line number and never a key."""


def parse_keys(text: str) -> dict[bytes, str]:
    """SHA-256 of each key -> its label. Blank lines and lines that start with `#` are skipped. Raises KeyFileError."""
    labels: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise KeyFileError(f"line {number} is not `label: key` (a key is visible ASCII without spaces)")
        digest = _digest(match["key"])
        if digest in labels or match["label"] in labels.values():
            raise KeyFileError(f"line {number} repeats a label or a key")
        labels[digest] = match["label"]
    if not labels:
        raise KeyFileError("it holds no key")
    return labels


def presented_key(authorization: str | None, api_key: str | None) -> str | None:
    """The key of an `authorization: Bearer KEY` or else of an `x-api-key: KEY` header (HTTP) or metadata entry (gRPC)."""
    if authorization is not None:
        scheme, _, key = authorization.partition(" ")
        return key.strip() if scheme.lower() == "bearer" else None
    return api_key.strip() if api_key is not None else None


class ApiKeys:
    """Who may call. Without a path everybody may, as ANONYMOUS; with one, only the keys that the file holds right now."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._signature: _Signature | None = None
        self._labels: dict[bytes, str] = {}
        self._complaint: str | None = None

    @property
    def required(self) -> bool:
        """Whether a key is needed at all."""
        return self._path is not None

    def count(self) -> int:
        """How many keys are accepted now; 0 when the file cannot be trusted."""
        if self._path is not None:
            self._refresh(self._path)
        return len(self._labels)

    def authenticate(self, key: str | None) -> str:
        """The label of a presented key. Raises UnauthenticatedError."""
        if self._path is None:
            return ANONYMOUS
        self._refresh(self._path)
        if not self._labels:
            raise UnauthenticatedError("no API key is accepted at present; the server's log says why")
        if not key:
            raise UnauthenticatedError("an API key is needed: send `Authorization: Bearer KEY`")
        digest = _digest(key)
        # Digests are compared, all of them, each in constant time: the time taken tells nothing about the keys.
        found = [label for known, label in self._labels.items() if hmac.compare_digest(known, digest)]
        if not found:
            raise UnauthenticatedError("the API key is not known here")
        return found[0]

    def _refresh(self, path: Path) -> None:
        try:
            status = path.stat()
            if _signature(status) == self._signature:
                return
            labels, self._signature = _read(path)
        except (OSError, KeyFileError) as error:
            self._labels, self._signature = {}, None
            self._complain(f"API key file {path} lets nobody in: {error}")
            return
        self._labels, self._complaint = labels, None
        log.info("API key file %s: %d keys (%s)", path, len(labels), ", ".join(sorted(labels.values())))

    def _complain(self, complaint: str) -> None:
        """Logs a complaint when it is a new one, not at every call."""
        if complaint != self._complaint:
            log.error("%s", complaint)
        self._complaint = complaint


def check_key_file(path: Path) -> None:
    """Raises OSError or KeyFileError when the file would let nobody in."""
    _read(path)


def _read(path: Path) -> tuple[dict[bytes, str], _Signature]:
    """Keys and signature of one and the same open file, so that a swap between the two cannot go unseen."""
    if not stat.S_ISREG(path.stat().st_mode):
        # Before it is opened: opening a pipe would wait for its writer.
        raise KeyFileError("it is not a regular file")
    with path.open(encoding="ascii") as file:
        status = os.fstat(file.fileno())
        largest = 0o640 if status.st_uid == 0 and os.geteuid() != 0 else 0o600
        if status.st_mode & 0o077 & ~largest:
            raise KeyFileError(f"its mode is {stat.S_IMODE(status.st_mode):04o}; it must be {largest:04o}")
        try:
            return parse_keys(file.read()), _signature(status)
        except UnicodeDecodeError as error:
            raise KeyFileError("it holds something else than ASCII text") from error


def _signature(status: os.stat_result) -> _Signature:
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino, status.st_mode)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
