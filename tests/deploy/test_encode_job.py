import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from espalier.deploy.encode import job
from espalier.deploy.encode.job import encode_checkpoint
from espalier.deploy.encode.lock import held
from espalier.deploy.encode.recipe import RECIPE_FILE
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.encode import encode_linear
from espalier.kernels.exl3.reference import effective_weight
from espalier.replicas.errors import CheckpointError, InvalidRequestError
from espalier.replicas.model.checkpoint import Checkpoint, open_checkpoint
from tests.support.tiny import make_tiny_checkpoint

LINEARS_A_LAYER = 7


def encode(source: Path, output: Path, **options: Any) -> None:
    encode_checkpoint(source, output, **({"bits": 8, "head_bits": 8, "threads": 2, "progress": False} | options))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that need padding, biases, more than one file."""
    folder = tmp_path_factory.mktemp("source")
    make_tiny_checkpoint(
        folder, architecture="qwen2", quantized=False, layers=1, hidden=96, intermediate=160, head_dim=32, shards=3
    )
    (folder / "LICENSE.txt").write_text("terms")
    return folder


@pytest.fixture(scope="module")
def encoded(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("encoded") / "tiny"
    encode(source, output)
    return output


def weights(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """True-width fp32 [out, in] of every linear, decoded if need be."""
    spec, found = checkpoint.spec, {}
    for linear in [*(linear for layer in spec.layers for linear in layer.linears), spec.head]:
        if checkpoint.is_quantized(linear.key):
            whole = effective_weight(checkpoint.exl3(linear.key)).T
            found[linear.key] = whole[: linear.out_features, : linear.in_features]
        else:
            found[linear.key] = checkpoint.entry(f"{linear.key}.weight").read().float()
    return found


def test_the_output_loads_and_is_close_to_the_source(source: Path, encoded: Path) -> None:
    original, result = open_checkpoint(source), open_checkpoint(encoded)
    wanted, found = weights(original), weights(result)
    assert wanted.keys() == found.keys() and len(wanted) == LINEARS_A_LAYER + 1
    for key, weight in wanted.items():
        assert result.is_quantized(key)
        assert float((found[key] - weight).norm() / weight.norm()) < 1.15 * 0.0050, key
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight"):
        assert torch.equal(result.entry(name).read(), original.entry(name).read())
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert torch.equal(result.entry(bias).read(), torch.cat([original.entry(bias).read()]))
    padded = result.entry("model.layers.0.self_attn.k_proj.bias").read()
    assert padded.shape == (128,) and bool((padded[64:] == 0).all())


def test_the_config_says_what_was_done_and_keeps_true_widths(source: Path, encoded: Path) -> None:
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, encoded))
    quantization = after.pop("quantization_config")
    assert (quantization["quant_method"], quantization["bits"], quantization["head_bits"]) == ("exl3", 8.0, 8)
    assert quantization["codebook"] == "mul1"
    assert after == before
    full = json.loads((encoded / "quantization_config.json").read_text())
    storage = full.pop("tensor_storage")
    assert full == quantization
    head = storage["lm_head"]
    assert (head["quant_format"], head["bits_per_weight"], head["mul1_multiplier"]) == ("exl3", 8, 2212286765)
    tensors = load_file(encoded / "model.safetensors")
    stored = {name: entry for module in storage.values() for name, entry in module["stored_tensors"].items()}
    assert stored.keys() == tensors.keys()
    for name, entry in stored.items():
        assert entry["shape"] == list(tensors[name].shape) and entry["dtype"] == str(tensors[name].dtype)


def test_other_files_are_copied_and_weights_are_not(source: Path, encoded: Path) -> None:
    kept = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE.txt"}
    made = {"config.json", "quantization_config.json", "model.safetensors", RECIPE_FILE}
    assert {file.name for file in encoded.iterdir()} == kept | made
    for name in kept:
        assert (encoded / name).read_bytes() == (source / name).read_bytes()
    assert not encoded.with_name("tiny.partial").exists()


def test_a_finished_run_returns_at_once_and_another_is_refused(
    source: Path, encoded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "encode_linear", None)
    encode(source, encoded)
    with pytest.raises(InvalidRequestError, match="holds something else") as caught:
        encode(source, encoded, bits=7)
    assert caught.value.param == "output"


def test_a_run_cut_short_goes_on_and_ends_the_same(
    source: Path, encoded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, calls = tmp_path / "tiny", list[int]()

    def fails_at_the_fourth(
        weight: torch.Tensor, rate: float, name: Codebook, seed: int, on_tiles: Callable[[int], None]
    ) -> Any:
        calls.append(seed)
        if len(calls) == 4:
            raise MemoryError
        return encode_linear(weight, rate, name, seed, on_tiles)

    monkeypatch.setattr(job, "encode_linear", fails_at_the_fourth)
    with pytest.raises(MemoryError):
        encode(source, output, threads=1)
    assert not output.exists()
    work = output.with_name("tiny.partial")
    num_done = len(list((work / "linears").glob("*.safetensors")))
    assert num_done >= 3
    with pytest.raises(InvalidRequestError, match="other options or another source"):
        encode(source, output, seed=1)
    num_calls = len(calls)
    encode(source, output, threads=1)
    assert len(calls) - num_calls == LINEARS_A_LAYER + 1 - num_done
    assert not work.exists()
    for file in encoded.iterdir():
        assert (output / file.name).read_bytes() == file.read_bytes(), file.name


def test_one_run_at_a_time(source: Path, tmp_path: Path) -> None:
    work = tmp_path / "tiny.partial"
    work.mkdir()
    with held(work, wait=False), pytest.raises(InvalidRequestError, match="another run is at work"):
        encode(source, tmp_path / "tiny")


def test_held_waits_for_its_turn(tmp_path: Path) -> None:
    order: list[str] = []
    started = threading.Event()

    def second() -> None:
        started.set()
        with held(tmp_path, wait=True):
            order.append("second")

    with held(tmp_path, wait=True):
        thread = threading.Thread(target=second)
        thread.start()
        assert started.wait(10)
        with pytest.raises(BlockingIOError), held(tmp_path, wait=False):
            pass
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


@pytest.mark.parametrize("head_bits", [8, 16])
def test_tied_heads(tmp_path: Path, head_bits: float, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_checkpoint(tmp_path / "source", quantized=False, layers=1, head="tied", intermediate=128)
    encode(folder, tmp_path / "out", head_bits=head_bits)
    result = open_checkpoint(tmp_path / "out")
    if head_bits == 16:
        assert result.head_is_tied
    else:
        table = result.entry("model.embed_tokens.weight").read().float()
        head = effective_weight(result.exl3("lm_head")).T
        assert not result.config.tie_word_embeddings
        assert float((head - table).norm() / table.norm()) < 1.15 * 0.0050


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"bits": 9}, "bits"),
        ({"bits": 4.5}, "bits"),
        ({"bits": 2.5, "codebook": "mcg"}, "bits"),
        ({"bits": 16}, "bits"),
        ({"head_bits": 0}, "head_bits"),
        ({"codebook": "mul2"}, "codebook"),
        ({"threads": 0}, "threads"),
    ],
)
def test_options_are_checked(source: Path, tmp_path: Path, options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        encode(source, tmp_path / "out", **options)
    assert caught.value.param == param and caught.value.message.startswith(param)
    assert not any(tmp_path.iterdir())


def test_sources_that_cannot_be_encoded(encoded: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*\.trellis: is EXL3 already"):
        encode(encoded, tmp_path / "out")
    with pytest.raises(InvalidRequestError, match="does not exist"):
        encode(tmp_path / "absent", tmp_path / "out")
    other = tmp_path / "model.onnx"
    other.write_text("")
    with pytest.raises(InvalidRequestError, match=r"neither a folder nor a \.gguf file"):
        encode(other, tmp_path / "out2")


def test_weights_must_be_finite(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path / "source", quantized=False, layers=1, shards=1)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = float("inf")
    job.write_tensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj\.weight: .*finite"):
        encode(folder, tmp_path / "out", threads=1)
