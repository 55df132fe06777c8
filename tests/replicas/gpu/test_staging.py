"""Bytes of files arrive as they are, whatever the buffers' size, and what fails is named."""

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from espalier.replicas.errors import CheckpointError
from espalier.replicas.gpu import staging
from espalier.replicas.gpu.staging import read_groups
from espalier.replicas.model.headers import TensorEntry, read_header
from tests.support.safetensors_edit import shift_data
from tests.support.tiny import make_tiny_checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path / "tiny", shards=2)


def groups_of(folder: Path, size: int = 5) -> list[list[TensorEntry]]:
    """All tensors, from both files in turn."""
    headers = [read_header(file) for file in sorted(folder.glob("*.safetensors"))]
    entries = sorted((entry for header in headers for entry in header.entries.values()), key=lambda entry: entry.name)
    return [entries[i : i + size] for i in range(0, len(entries), size)]


def check(groups: Sequence[Sequence[TensorEntry]]) -> None:
    count = 0
    for group, tensors in zip(groups, read_groups(groups, CPU), strict=True):
        assert list(tensors) == [entry.name for entry in group]
        for entry in group:
            want, got = entry.read(), tensors[entry.name]
            assert got.dtype == want.dtype and got.shape == want.shape and torch.equal(got, want)
            assert got.data_ptr() % 16 == 0
            count += 1
    assert count == sum(map(len, groups)) > 20


@pytest.mark.parametrize("buffer_bytes", [257, 4096, 32 << 20])
@pytest.mark.parametrize("num_buffers", [1, 3, 8])
def test_every_byte_arrives(folder: Path, buffer_bytes: int, num_buffers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(staging, "NUM_BUFFERS", num_buffers)
    check(groups_of(folder)[:6])


def test_tensors_may_lie_at_any_byte(folder: Path) -> None:
    for file in sorted(folder.glob("*.safetensors")):
        shift_data(file, sorted(read_header(file).entries)[5], 3)
    groups = groups_of(folder)
    assert any(entry.begin % 2 for group in groups for entry in group)
    check(groups)


def test_groups_keep_nothing_of_each_other(folder: Path) -> None:
    groups = groups_of(folder)
    storages = [next(iter(tensors.values())).untyped_storage().nbytes() for tensors in read_groups(groups, CPU)]
    for group, held in zip(groups, storages, strict=True):
        own = sum(entry.end - entry.begin for entry in group)
        assert own <= held < own + 256 * len(group)


def test_nothing_is_read_for_meta(folder: Path) -> None:
    groups = groups_of(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    read = list(read_groups(groups, torch.device("meta")))
    for group, tensors in zip(groups, read, strict=True):
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {e.name: e.shape for e in group}
        assert all(tensor.is_meta for tensor in tensors.values())


def test_a_file_that_became_shorter_names_the_tensor(folder: Path) -> None:
    groups = groups_of(folder)
    last = max((entry for group in groups for entry in group), key=lambda entry: (entry.file.name, entry.end))
    os.truncate(last.file, last.end - 1)
    with pytest.raises(CheckpointError) as caught:
        list(read_groups(groups, CPU))
    for word in (str(last.file), last.name, "truncated", str(last.end)):
        assert word in caught.value.message


def test_a_file_that_is_gone_is_named(folder: Path) -> None:
    groups = groups_of(folder)
    groups[0][0].file.unlink()
    with pytest.raises(CheckpointError, match=r"model-0000.-of-00002\.safetensors: cannot be read: No such file"):
        list(read_groups(groups, CPU))


def test_ending_early_leaves_no_thread_and_no_open_file(folder: Path) -> None:
    def open_files() -> set[str]:
        paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return {os.readlink(path) for path in paths if os.path.lexists(path)}

    groups = groups_of(folder)
    with contextlib.closing(read_groups(groups, CPU)) as parts:
        next(parts)
        assert str(groups[0][0].file) in open_files()
        assert any(thread.name.startswith("reader") for thread in threading.enumerate())
    assert not open_files() & {str(file) for file in folder.glob("*.safetensors")}
    assert not any(thread.name.startswith("reader") for thread in threading.enumerate())


def test_files_stay_open_until_the_last_reader_is_done(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, gate, failures, ended = staging._read, threading.Event(), [], []
    groups = groups_of(folder)
    first = groups[0][0].name

    def slow_read(file: int, piece: staging._Piece, target: memoryview) -> None:
        if piece.entry.name != first:
            assert gate.wait(30)
        try:
            read(file, piece, target)
        except CheckpointError as error:
            failures.append(error)
        ended.append(piece.entry.name)

    monkeypatch.setattr(staging, "_read", slow_read)
    parts = read_groups([groups[0][:1], *groups[1:]], CPU)
    assert list(next(parts)) == [first]
    readers = [thread for thread in threading.enumerate() if thread.name.startswith("reader")]
    opener = threading.Timer(0.2, gate.set)
    opener.start()
    parts.close()  # waits for reads that have begun, which end when the gate opens
    opener.join()
    for thread in readers:
        thread.join(30)
    assert readers and len(ended) > 1 and failures == []
