"""Random checkpoints: sound, the same for the same seed, and numbers that stay of variance 1 through the network."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from espalier.deploy.cli import main
from espalier.deploy.random_model import tensors, write
from espalier.deploy.random_model.shapes import SHAPES
from espalier.deploy.random_model.tensors import random_modules
from espalier.deploy.random_model.write import write_random_model
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.reference import linear
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.model.checkpoint import Checkpoint, open_checkpoint
from espalier.replicas.model.config import ModelConfig
from espalier.replicas.model.families import LinearSpec, network_spec


def make(folder: Path, **options: Any) -> Checkpoint:
    return write_random_model(folder, "tiny", **({"threads": 2} | options))


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make(tmp_path_factory.mktemp("random") / "tiny")


def linears(checkpoint: Checkpoint) -> list[LinearSpec]:
    spec = checkpoint.spec
    return [*(linear for layer in spec.layers for linear in layer.linears), spec.head]


def test_it_opens_with_the_rates_asked_for(made: Checkpoint) -> None:
    assert open_checkpoint(made.path) == made
    rates = {spec.key: made.exl3(spec.key).rate for spec in linears(made)}
    assert rates.pop("lm_head") == 6.0 and set(rates.values()) == {4.0} and len(rates) == 14
    assert {made.exl3(spec.key).codebook for spec in linears(made)} == {Codebook.MUL1}
    assert not made.path.with_name("tiny.partial").exists()


def test_the_safetensors_library_reads_it_too(made: Checkpoint) -> None:
    tensors = load_file(made.path / "model.safetensors")
    assert set(tensors) == set(made.entries)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, made.entry(name).read())


def test_what_the_configs_say(made: Checkpoint) -> None:
    config = json.loads((made.path / "config.json").read_text())
    quantization = json.loads((made.path / "quantization_config.json").read_text())
    storage = quantization.pop("tensor_storage")
    assert config["quantization_config"] == quantization
    assert (quantization["bits"], quantization["head_bits"], quantization["codebook"]) == (4.0, 6, "mul1")
    stored = {name: entry for module in storage.values() for name, entry in module["stored_tensors"].items()}
    assert set(stored) == set(made.entries)
    for name, described in stored.items():
        tensor = made.entry(name).read()
        assert described == {"shape": list(tensor.shape), "n_bytes": tensor.nbytes, "dtype": str(tensor.dtype)}
    assert storage["lm_head"]["bits_per_weight"] == 6 and storage["lm_head"]["mul1_multiplier"] == 0x83DCD12D


@pytest.mark.parametrize("codebook", tuple(Codebook))
@pytest.mark.parametrize("bits", [1, 3.5, 8])
def test_every_rate_and_codebook(codebook: str, bits: float, tmp_path: Path) -> None:
    if bits != int(bits) and codebook != "mul1":
        with pytest.raises(InvalidRequestError, match=f"bits: must be one of .* with codebook {codebook}, is 3.5"):
            make(tmp_path / "out", bits=bits, codebook=codebook)
        return
    checkpoint = make(tmp_path / "out", bits=bits, head_bits=bits, codebook=codebook, layers=1)
    assert checkpoint.config.num_layers == 1
    assert {(checkpoint.exl3(spec.key).rate, checkpoint.exl3(spec.key).codebook) for spec in linears(checkpoint)} == {
        (bits, codebook)
    }


def test_a_plain_head(tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "out", head_bits=16, layers=1)
    weight = checkpoint.entry("lm_head.weight").read().float()
    assert not checkpoint.head_is_tied and weight.std() * 256**0.5 == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("codebook", tuple(Codebook))
def test_outputs_have_variance_1(codebook: str, tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "out", codebook=codebook, layers=1)
    for spec in linears(checkpoint):
        x = torch.randn(64, spec.in_features)
        y = linear(x.half(), checkpoint.exl3(spec.key), dtype=torch.float32)
        assert y.square().mean() == pytest.approx(1.0, abs=0.15), spec.key
        assert abs(y.mean()) < 0.1
    for name in (checkpoint.spec.embedding, "model.norm.weight", "model.layers.0.self_attn.q_norm.weight"):
        tensor = checkpoint.entry(name).read().float()
        mean, spread = {"model.norm.weight": (1.0, 0.1), checkpoint.spec.embedding: (0.0, 1.0)}.get(name, (1.6, 0.1))
        assert tensor.mean() == pytest.approx(mean, abs=0.05) and tensor.std() == pytest.approx(spread, rel=0.2)


def test_trellises_are_random_in_every_bit(made: Checkpoint) -> None:
    words = torch.cat([made.exl3(spec.key).trellis.flatten() for spec in linears(made)])
    for bit in range(16):
        assert (words >> bit & 1).double().mean() == pytest.approx(0.5, abs=0.01)
    q, k = (made.exl3(f"model.layers.0.self_attn.{name}_proj").trellis for name in "qk")
    assert not torch.equal(q[:, : k.shape[1]], k)


def test_the_seed_decides_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = content(make(tmp_path / "first", seed=3, threads=1).path)
    assert content(make(tmp_path / "again", seed=3, threads=4).path) == first
    other = content(make(tmp_path / "other", seed=4).path)
    assert other.keys() == first.keys()
    assert {name for name in first if other[name] != first[name]} == {"model.safetensors"}
    # Shards and the pieces of a tensor: the tensors of several files, cut small, are sound too.
    monkeypatch.setattr(write, "SHARD_BYTES", 150_000)
    sharded = make(tmp_path / "sharded", seed=3)
    whole = open_checkpoint(tmp_path / "first")
    assert len(sharded.headers) > 3
    for name, entry in sharded.entries.items():
        assert torch.equal(entry.read(), whole.entry(name).read())
    for header in sharded.headers:
        assert sum(e.end - e.begin for e in header.entries.values()) <= 150_000 or len(header.entries) == 1
    monkeypatch.setattr(write, "PIECE_BYTES", 1024)
    monkeypatch.setattr(tensors, "PIECE_BYTES", 1024)
    pieces = make(tmp_path / "pieces", seed=3)
    table = pieces.entry(pieces.spec.embedding).read().float()
    assert table.std() == pytest.approx(1.0, abs=0.02) and len(table.unique()) > 10_000


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"bits": 4.5}, "bits"),
        ({"head_bits": 0}, "head_bits"),
        ({"codebook": "none"}, "codebook"),
        ({"layers": 0}, "layers"),
        ({"seed": -1}, "seed"),
        ({"threads": 0}, "threads"),
        ({"tokenizer_from": Path("/nowhere")}, "tokenizer_from"),
    ],
)
def test_what_cannot_be_made_is_refused(options: dict[str, Any], param: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make(tmp_path / "out", **options)
    assert caught.value.param == param and caught.value.message.startswith(f"{param}: ")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten_and_nothing_half_done_is_left(
    made: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(made.path)
    with pytest.raises(InvalidRequestError, match="exists and holds something else"):
        make(made.path)
    assert content(made.path) == before

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write.os, "posix_fallocate", full)
    with pytest.raises(InvalidRequestError, match=r"out: .*/new cannot be written: No space left on device"):
        make(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_is_copied(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.bin"):
        (source / name).write_text(name)
    out = make(tmp_path / "out", tokenizer_from=source).path
    assert (out / "tokenizer.json").read_text() == "tokenizer.json"
    assert (out / "chat_template.jinja").exists() and not (out / "model.bin").exists()


@pytest.mark.parametrize(
    ("shape", "gigabytes"),
    # Packed linears alone: 36 layers of 192.9 M weights at 4 bits with a head of 622 M at 6; 64 layers of 330.3 M, a head of 1,271 M.
    [("qwen3-8b", 3.94), ("qwen3-27b", 11.53)],
)
def test_shapes_of_models(shape: str, gigabytes: float, tmp_path: Path) -> None:
    config = SHAPES[shape].config()
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = network_spec(ModelConfig.from_checkpoint(tmp_path))
    modules = random_modules(spec, 4.0, 6.0, Codebook.MUL1)
    packed = sum(t.num_bytes for module in modules for t in module.tensors if module.bits is not None)
    assert packed / 1e9 == pytest.approx(gigabytes, rel=0.005)
    assert {module.key for module in modules} >= {"lm_head", "model.embed_tokens", "model.norm"}


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["random-model", str(out), "--shape", "tiny", "--bits", "3.5", "--layers", "1", "--seed", "9"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{out}\n"
    checkpoint = open_checkpoint(out)
    assert checkpoint.exl3("model.layers.0.mlp.up_proj").rate == 3.5
    assert main(arguments) == 2
    assert "exists and holds something else" in capsys.readouterr().err


def test_the_module_runs_where_little_is_installed(root: Path, tmp_path: Path) -> None:
    code = (
        "import sys, runpy\n"
        "absent = ('ray', 'aiohttp', 'pydantic', 'yaml', 'tqdm', 'tokenizers', 'gguf', 'safetensors', 'jinja2')\n"
        "sys.modules.update(dict.fromkeys(absent))\n"
        f"sys.argv = ['random-model', {str(tmp_path / 'out')!r}, '--shape', 'tiny']\n"
        "runpy.run_module('espalier.deploy.random_model', run_name='__main__')\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=60)
    assert open_checkpoint(tmp_path / "out").config.num_layers == 2
