"""Broken checkpoints are refused before any weight is read, by file and tensor name; odd but sound ones load."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from espalier.kernels.exl3.codebook import Codebook
from espalier.replicas.errors import CheckpointError
from espalier.replicas.model.checkpoint import open_checkpoint
from espalier.replicas.model.headers import TensorEntry
from tests.support.safetensors_edit import edit_header, edit_tensors, join, shift_data, split
from tests.support.tiny import make_tiny_checkpoint

DOWN = "model.layers.1.mlp.down_proj"
Q = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    make_tiny_checkpoint(root / "single")
    make_tiny_checkpoint(root / "sharded", shards=3)
    make_tiny_checkpoint(root / "plain", quantized=False, head="tied")
    make_tiny_checkpoint(root / "plainhead", head="plain")
    make_tiny_checkpoint(root / "half", bits=2.5)
    return root


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copied(name: str) -> Path:
        return Path(shutil.copytree(made / name, tmp_path / name))

    return copied


def refused(folder: Path, *words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """open_checkpoint raises, its message has the words, and no tensor but a scalar was read."""
    read = TensorEntry.read

    def only_scalars(entry: TensorEntry) -> torch.Tensor:
        assert entry.end - entry.begin <= 8, f"{entry.name} was read"
        return read(entry)

    monkeypatch.setattr(TensorEntry, "read", only_scalars)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    for word in words:
        assert word in caught.value.message, caught.value.message


@pytest.mark.parametrize("name", ["single", "sharded", "plain", "plainhead", "half"])
def test_sound_ones_open(made: Path, name: str) -> None:
    checkpoint = open_checkpoint(made / name)
    assert checkpoint.head_is_tied == (name == "plain")
    assert checkpoint.is_quantized(Q) == (name != "plain")
    assert checkpoint.is_quantized("lm_head") == (name not in ("plain", "plainhead"))
    assert len({entry.name for entry in checkpoint.needed()}) == len(checkpoint.needed())


# --- files ----------------------------------------------------------------------------------------------------------


def test_missing_shard(copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("sharded")
    (folder / "model-00002-of-00003.safetensors").unlink()
    refused(folder, "model-00002-of-00003.safetensors", "missing", monkeypatch=monkeypatch)


def test_shard_with_tensors_the_index_lacks(copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("sharded")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = index["weight_map"].pop(f"{DOWN}.suh")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, file, f"{DOWN}.suh", monkeypatch=monkeypatch)


def test_index_with_tensors_the_shard_lacks(copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("sharded")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.ghost"] = "model-00001-of-00003.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "model-00001-of-00003.safetensors", "model.ghost", monkeypatch=monkeypatch)


def test_shard_the_index_does_not_name(copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("sharded")
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "model-00004-of-00004.safetensors")
    refused(folder, "model-00004-of-00004.safetensors", monkeypatch=monkeypatch)


def test_index_that_leaves_the_folder(copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("sharded")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    refused(folder, "../x.safetensors", monkeypatch=monkeypatch)


def test_no_weights_and_no_folder(copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("single")
    (folder / "model.safetensors").unlink()
    refused(folder, "model.safetensors", monkeypatch=monkeypatch)
    refused(folder / "nowhere", "nowhere", monkeypatch=monkeypatch)


def test_truncated_file(copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file = copy("single") / "model.safetensors"
    header, data = split(file)
    last = max((k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"][1])
    join(file, header, data[:-1])
    refused(file.parent, "model.safetensors", last, "truncated", monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    "content", [b"", b"\x10\x00", struct.pack("<Q", 10**6) + b"{}", struct.pack("<Q", 2**63) + b"{}"]
)
def test_header_longer_than_the_file(
    copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    file = copy("single") / "model.safetensors"
    file.write_bytes(content)
    refused(file.parent, "model.safetensors", "header", monkeypatch=monkeypatch)


@pytest.mark.parametrize(
    "text", [b"[]", b"{", b'{"a": 3}', b"\xff\xfe", b'{"a": {"dtype": "F16", "shape": [-1], "data_offsets": [0, 0]}}']
)
def test_header_that_is_no_header(copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    file = copy("single") / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    refused(file.parent, "model.safetensors", monkeypatch=monkeypatch)


def test_a_tensor_named_twice(copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file = copy("single") / "model.safetensors"
    entry = b'"w": {"dtype": "F16", "shape": [0], "data_offsets": [0, 0]}'
    text = b"{" + entry + b", " + entry + b"}"
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    refused(file.parent, "w", "twice", monkeypatch=monkeypatch)


def test_overlapping_offsets(copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file = copy("single") / "model.safetensors"

    def overlap(header: dict) -> None:  # type: ignore[type-arg]
        header[f"{DOWN}.suh"]["data_offsets"] = header[f"{Q}.suh"]["data_offsets"]
        header[f"{DOWN}.suh"]["shape"] = header[f"{Q}.suh"]["shape"]

    edit_header(file, overlap)
    refused(file.parent, "model.safetensors", f"{DOWN}.suh", "overlaps", monkeypatch=monkeypatch)


def test_bytes_that_do_not_fill_the_shape(copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file = copy("single") / "model.safetensors"
    edit_header(file, lambda header: header[f"{DOWN}.svh"].update(shape=[127]))
    refused(file.parent, f"{DOWN}.svh", monkeypatch=monkeypatch)


def test_holes_and_odd_bytes_are_fine(copy: Callable[[str], Path]) -> None:
    folder = copy("single")
    before = open_checkpoint(folder).exl3(DOWN)
    shift_data(folder / "model.safetensors", f"{DOWN}.suh", 3)
    shift_data(folder / "model.safetensors", f"{DOWN}.trellis", 1)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.entry(f"{DOWN}.trellis").begin % 2 or checkpoint.entry(f"{DOWN}.suh").begin % 2
    after = checkpoint.exl3(DOWN)
    assert torch.equal(after.trellis, before.trellis)
    assert torch.equal(after.suh, before.suh)
    assert torch.equal(after.svh, before.svh)


# --- tensors --------------------------------------------------------------------------------------------------------


def _set(name: str, make: Callable[[Tensors], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: make(tensors).contiguous()})


def _drop(*names: str) -> Callable[[Tensors], None]:
    def drop(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return drop


BROKEN: list[tuple[str, Callable[[Tensors], None], tuple[str, ...]]] = [
    ("trellis dtype", _set(f"{Q}.trellis", lambda t: t[f"{Q}.trellis"].to(torch.int32)), (f"{Q}.trellis", "int16")),
    ("trellis dims", _set(f"{Q}.trellis", lambda t: t[f"{Q}.trellis"][0]), (f"{Q}.trellis",)),
    ("trellis words", _set(f"{Q}.trellis", lambda t: t[f"{Q}.trellis"][:, :, :63]), (f"{Q}.trellis", "63")),
    ("trellis not of 128", _set(f"{Q}.trellis", lambda t: t[f"{Q}.trellis"][:, :12]), (f"{Q}.trellis", "128")),
    ("trellis of another width", _set(f"{Q}.trellis", lambda t: t[f"{Q}.trellis"][:, :8]), (f"{Q}.trellis", "256")),
    ("suh and su", _set(f"{Q}.su", lambda t: torch.zeros(8, dtype=torch.int16)), (f"{Q}.su", f"{Q}.suh")),
    ("svh and sv", _set(f"{Q}.sv", lambda t: torch.zeros(16, dtype=torch.int16)), (f"{Q}.sv", f"{Q}.svh")),
    ("no suh", _drop(f"{Q}.suh"), (f"{Q}.suh",)),
    ("suh dtype", _set(f"{Q}.suh", lambda t: t[f"{Q}.suh"].float()), (f"{Q}.suh", "F16")),
    ("svh shape", _set(f"{Q}.svh", lambda t: t[f"{Q}.svh"][:128]), (f"{Q}.svh", "[256]")),
    (
        "both markers",
        _set(f"{Q}.mcg", lambda t: torch.tensor(Codebook.MCG.marker, dtype=torch.int32)),
        (f"{Q}.m", "codebook"),
    ),
    ("marker value", _set(f"{Q}.mul1", lambda t: torch.tensor(7, dtype=torch.int32)), (f"{Q}.mul1", "7")),
    ("marker dtype", _set(f"{Q}.mul1", lambda t: torch.tensor(7.0)), (f"{Q}.mul1", "I32")),
    ("group and weight", _set(f"{Q}.weight", lambda t: torch.zeros(256, 128)), (f"{Q}.weight", "trellis")),
    ("group without trellis", _drop(f"{Q}.trellis"), (f"{Q}.s", "trellis")),
    ("no linear", _drop(*(f"{Q}.{part}" for part in ("trellis", "suh", "svh", "mul1"))), (f"{Q}.weight", "missing")),
    ("no norm", _drop("model.norm.weight"), ("model.norm.weight", "missing")),
    ("norm shape", _set("model.norm.weight", lambda t: torch.ones(64)), ("model.norm.weight", "[128]")),
    ("norm dtype", _set("model.norm.weight", lambda t: torch.ones(128, dtype=torch.int8)), ("model.norm.weight", "I8")),
    ("no embedding", _drop("model.embed_tokens.weight"), ("model.embed_tokens.weight", "missing")),
    (
        "vocabulary",
        _set("model.embed_tokens.weight", lambda t: torch.zeros(511, 128)),
        ("model.embed_tokens.weight", "512"),
    ),
    ("bias shape", _set(f"{Q}.bias", lambda t: torch.zeros(255)), (f"{Q}.bias", "[256]")),
    (
        "no head",
        _drop(*(f"lm_head.{part}" for part in ("trellis", "suh", "svh", "mul1"))),
        ("lm_head.weight", "missing"),
    ),
    (
        "a part that no Llama has",
        _set("model.layers.0.self_attn.q_norm.weight", lambda t: torch.ones(64)),
        ("model.layers.0.self_attn.q_norm.weight", "llama"),
    ),
]


@pytest.mark.parametrize(("change", "words"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_broken_tensors(
    copy: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Tensors], None],
    words: tuple[str, ...],
) -> None:
    folder = copy("single")
    edit_tensors(folder / "model.safetensors", change)
    refused(folder, *words, monkeypatch=monkeypatch)


def test_half_rate_without_mul1(copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("half")
    edit_tensors(folder / "model.safetensors", _drop(f"{Q}.mul1"))
    refused(folder, f"{Q}.trellis", "mul1", monkeypatch=monkeypatch)


def test_quantized_embedding_is_refused_by_name(copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy("single")

    def quantize(tensors: Tensors) -> None:
        del tensors["model.embed_tokens.weight"]
        tensors["model.embed_tokens.trellis"] = torch.zeros(512, 65, dtype=torch.int16)

    edit_tensors(folder / "model.safetensors", quantize)
    refused(folder, "model.embed_tokens.trellis", monkeypatch=monkeypatch)


def test_legacy_signs_read_as_scales(copy: Callable[[str], Path]) -> None:
    folder = copy("single")

    def pack(tensors: Tensors) -> None:
        del tensors[f"{Q}.suh"]
        tensors[f"{Q}.su"] = torch.tensor([1, -1, 0, 0, 0, 0, 0, -32768], dtype=torch.int16)

    edit_tensors(folder / "model.safetensors", pack)
    suh = open_checkpoint(folder).exl3(Q).suh
    assert suh[0] == -1
    assert suh[1] == 1
    assert (suh[16:32] == -1).all()
    assert suh[127] == -1


def test_tensors_of_other_modules_are_left_alone(copy: Callable[[str], Path]) -> None:
    folder = copy("single")

    def add(tensors: Tensors) -> None:
        tensors["mtp.fc.weight"] = torch.zeros(3)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(32)
        tensors["model.layers.9.mlp.gate.weight"] = torch.zeros(3)

    edit_tensors(folder / "model.safetensors", add)
    assert "mtp.fc.weight" not in {entry.name for entry in open_checkpoint(folder).needed()}
