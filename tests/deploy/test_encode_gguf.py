import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from espalier.deploy.encode.gguf_source import open_gguf, undo_row_permutation
from espalier.deploy.encode.gguf_tokenizer import write_tokenizer
from espalier.replicas.errors import CheckpointError
from tests.support.tiny import make_tiny_checkpoint
from tests.support.tiny_gguf import tokenizer_metadata, write_tiny_gguf

TEXTS = (
    "Hello, world! What is the capital of France?",
    "In 1969 3,141,592 people; 12345 0.5e-10 x2y3",
    "def f(x):\n\treturn x**2  # twice\r\n\n\n    pass",
    "  leading and trailing   ",
    "naïve café, Ελλάδα, Москва, 日本語テキスト, 🙂👍🏽, e\u0301",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<|endoftext|>",
    "I'll we've don't IT'S o'clock",
    "½ ² ٣ ५ Ⅷ\u00a0\u3000x\u200b",
    "",
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("plain"), quantized=False, hidden=96, intermediate=160)


@pytest.fixture(scope="module")
def file(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", plain)


def test_tensors_come_back_under_their_names(plain: Path, file: Path, tmp_path: Path) -> None:
    source = open_gguf(file, tmp_path)
    assert not source.head_is_tied
    for name, tensor in load_file(plain / "model.safetensors").items():
        assert source.has(name)
        found, wanted = source.read(name), tensor.float()
        if name == "model.embed_tokens.weight":  # stored in 8 bits
            assert float((found - wanted).norm() / wanted.norm()) < 0.01
        else:
            assert torch.equal(found, wanted), name


def test_config_and_tokenizer_are_rebuilt(plain: Path, file: Path, tmp_path: Path) -> None:
    source = open_gguf(file, tmp_path)
    rebuilt, original = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, plain))
    assert {key: original[key] for key in rebuilt} == rebuilt
    assert original.keys() - rebuilt.keys() == {"attention_bias"}
    assert source.spec.hidden_size == 96
    assert {f.name for f in source.files()} == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    ours, theirs = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (tmp_path, plain))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == text
    settings, expected = (json.loads((folder / "tokenizer_config.json").read_text()) for folder in (tmp_path, plain))
    for key in ("chat_template", "bos_token", "eos_token", "pad_token", "added_tokens_decoder", "tokenizer_class"):
        assert settings[key] == expected[key]


def test_row_permutation_is_undone_for_vectors_too() -> None:
    rows = torch.arange(12.0)
    interleaved = torch.tensor([0.0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])
    assert torch.equal(undo_row_permutation(interleaved, 2), rows)
    assert torch.equal(undo_row_permutation(interleaved[:, None].expand(12, 3), 2), rows[:, None].expand(12, 3))


def refused(file: Path, tmp_path: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        open_gguf(file, tmp_path / "scratch")
    assert str(file) in caught.value.message


def test_keys_that_have_no_place_are_refused(plain: Path, tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "x.gguf", plain, lambda writer: writer.add_sliding_window(64))
    refused(file, tmp_path, r"llama\.attention\.sliding_window")


def test_tensors_that_have_no_place_are_refused(plain: Path, tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.ones(32, dtype=np.float32))

    refused(write_tiny_gguf(tmp_path / "x.gguf", plain, add), tmp_path, r"rope_freqs\.weight: tensor has no place")


def test_a_missing_layer_is_refused(plain: Path, tmp_path: Path) -> None:
    def deeper(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["llama.block_count"].value = 3

    refused(write_tiny_gguf(tmp_path / "x.gguf", plain, deeper), tmp_path, r"blk\.2\.\w+\.weight: tensor is missing")


def test_other_tokenizers_and_architectures_are_refused(plain: Path, tmp_path: Path) -> None:
    def set_key(key: str, value: str) -> Path:
        def change(writer: gguf.GGUFWriter) -> None:
            writer.kv_data[0][key].value = value

        return write_tiny_gguf(tmp_path / f"{value}.gguf", plain, change)

    refused(set_key("tokenizer.ggml.model", "llama"), tmp_path, r"tokenizer\.ggml\.model: 'llama'")
    refused(set_key("tokenizer.ggml.pre", "tekken"), tmp_path, r"tokenizer\.ggml\.pre: 'tekken'")
    refused(set_key("general.architecture", "gemma"), tmp_path, r"general\.architecture: 'gemma'")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file at all", b"GGUF" + struct.pack("<I", 99)])
def test_broken_files_are_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    refused(file, tmp_path, "cannot be read as GGUF")


def test_smollm_tokenizer_gives_the_originals_ids(shared: Path, tmp_path: Path) -> None:
    original = next((shared / "models").glob("smollm2-*")) / "tokenizer.json"
    write_tokenizer(Path("x.gguf"), tokenizer_metadata(original, "smollm"), tmp_path)
    theirs, ours = (Tokenizer.from_file(str(f)) for f in (original, tmp_path / "tokenizer.json"))
    for text in (*TEXTS, (shared / "models" / "golden" / "text.txt").read_text()):
        assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)
