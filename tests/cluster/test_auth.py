"""The key file: what it accepts, that it is read again when it changes, and that a broken one lets nobody in."""

import logging
import os
import stat
from pathlib import Path

import pytest

from espalier.cluster.ingress.auth import ANONYMOUS, ApiKeys, KeyFileError, parse_keys, presented_key
from espalier.cluster.ingress.errors import UnauthenticatedError


def _write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def _owned_by_root(status: os.stat_result) -> os.stat_result:
    fields = list(status)
    fields[stat.ST_UID] = 0
    return os.stat_result(fields, {"st_mtime_ns": status.st_mtime_ns, "st_ctime_ns": status.st_ctime_ns})


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return _write(tmp_path / "keys", "# people\n\nada: key-of-ada\nbob:key-of-bob\n")


def test_without_a_file_everybody_may() -> None:
    keys = ApiKeys(None)
    assert keys.authenticate(None) == ANONYMOUS
    assert not keys.required
    assert keys.count() == 0


def test_keys_have_labels(key_file: Path) -> None:
    keys = ApiKeys(key_file)
    assert keys.required
    assert keys.authenticate("key-of-ada") == "ada"
    assert keys.authenticate("key-of-bob") == "bob"


@pytest.mark.parametrize("key", [None, "", "key-of-eve", "key-of-ad", "key-of-ada ", "ada", "ключ", "# people"])
def test_other_keys_are_refused(key_file: Path, key: str | None) -> None:
    with pytest.raises(UnauthenticatedError):
        ApiKeys(key_file).authenticate(key)


def test_a_changed_file_counts_at_once(key_file: Path) -> None:
    keys = ApiKeys(key_file)
    keys.authenticate("key-of-ada")
    _write(key_file, "ada: another-key\n")
    with pytest.raises(UnauthenticatedError):
        keys.authenticate("key-of-ada")
    assert keys.authenticate("another-key") == "ada"


def test_a_replaced_file_of_the_same_size_and_time_counts(key_file: Path, tmp_path: Path) -> None:
    keys = ApiKeys(key_file)
    keys.authenticate("key-of-ada")
    before = key_file.stat()
    other = _write(tmp_path / "other", key_file.read_text().replace("key-of-ada", "yek-of-ada"))
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(key_file)
    assert (key_file.stat().st_size, key_file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert keys.authenticate("yek-of-ada") == "ada"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_file_that_others_may_touch_closes_and_opens_again(
    key_file: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(key_file)
    keys.authenticate("key-of-ada")
    key_file.chmod(mode)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            with pytest.raises(UnauthenticatedError, match="at present"):
                keys.authenticate("key-of-ada")
    assert [record.getMessage() for record in caplog.records] == [
        f"API key file {key_file} lets nobody in: its mode is {mode:04o}; it must be 0600"
    ]
    key_file.chmod(0o600)
    assert keys.authenticate("key-of-ada") == "ada"


@pytest.mark.parametrize(("mode", "accepted"), [(0o440, True), (0o640, True), (0o660, False), (0o644, False)])
def test_the_group_may_read_what_root_gave_to_somebody_else(
    key_file: Path, mode: int, accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Secret's file in a pod: owned by root, readable by the group that Kubernetes gave the process."""
    fstat = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: _owned_by_root(fstat(fd)))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    key_file.chmod(mode)
    assert ApiKeys(key_file).count() == (2 if accepted else 0)


def test_the_count_follows_the_file(key_file: Path) -> None:
    keys = ApiKeys(key_file)
    assert keys.count() == 2
    key_file.chmod(0o644)
    assert keys.count() == 0
    _write(key_file, "ada: key-of-ada\n")
    assert keys.count() == 1
    key_file.unlink()
    assert keys.count() == 0


def test_a_missing_file_closes_until_it_is_there(tmp_path: Path) -> None:
    keys = ApiKeys(tmp_path / "keys")
    with pytest.raises(UnauthenticatedError):
        keys.authenticate("key-of-ada")
    _write(tmp_path / "keys", "ada: key-of-ada")
    assert keys.authenticate("key-of-ada") == "ada"


@pytest.mark.parametrize(
    "text",
    ["", "# nothing but this\n", "ada\n", "ada:\n", ": key\n", "ada: two words\n", "ada: k\nada: l\n", "a: k\nb: k\n"],
)
def test_a_broken_file_closes(key_file: Path, text: str) -> None:
    keys = ApiKeys(key_file)
    keys.authenticate("key-of-ada")
    _write(key_file, text)
    with pytest.raises(UnauthenticatedError, match="at present"):
        keys.authenticate("key-of-ada")


def test_bytes_that_are_not_text_close(key_file: Path) -> None:
    key_file.write_bytes(b"ada: \xff\xfe\n")
    with pytest.raises(UnauthenticatedError, match="at present"):
        ApiKeys(key_file).authenticate("\xff\xfe")


def test_a_directory_closes(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o700)
    with pytest.raises(UnauthenticatedError, match="at present"):
        ApiKeys(tmp_path / "keys").authenticate("x")


def test_complaints_name_the_line_and_no_key() -> None:
    with pytest.raises(KeyFileError, match="line 2") as caught:
        parse_keys("ada: hush\nbob: my secret\n")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("authorization", "api_key", "key"),
    [
        ("Bearer k", None, "k"),
        ("bearer  k ", None, "k"),
        (None, "k", "k"),
        ("Bearer k", "other", "k"),
        ("Basic k", "other", None),
        ("k", None, None),
        (None, None, None),
    ],
)
def test_presented_key(authorization: str | None, api_key: str | None, key: str | None) -> None:
    assert presented_key(authorization, api_key) == key
