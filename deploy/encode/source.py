"""What is encoded: a Hugging Face folder or a GGUF file, both seen as a network's tensors and the small files beside them.

Knows where weights come from, nothing of how they are quantized.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from espalier.deploy.encode.gguf_source import open_gguf
from espalier.replicas.errors import CheckpointError, InvalidRequestError
from espalier.replicas.model.checkpoint import Checkpoint, open_checkpoint
from espalier.replicas.model.families import NetworkSpec

# Weights in any format: they are encoded or left out, never copied.
_WEIGHT_FILES = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".gguf",
    ".pt",
    ".pth",
    ".msgpack",
)


class Source(Protocol):
    """A network to encode. Names are the checkpoint's (see families.py); weights lie [out, in] as in `.weight` files."""

    @property
    def spec(self) -> NetworkSpec:
        """The linears and vectors of the network."""

    @property
    def head_is_tied(self) -> bool:
        """Whether the embedding table is the head."""

    def files(self) -> list[Path]:
        """Files to keep beside the weights, config.json among them."""

    def read(self, name: str) -> Tensor:
        """The tensor of that name. Raises CheckpointError naming file and tensor."""

    def has(self, name: str) -> bool:
        """Whether there is such a tensor, say a bias."""


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A checked Hugging Face folder of plain weights."""

    checkpoint: Checkpoint

    @property
    def spec(self) -> NetworkSpec:
        return self.checkpoint.spec

    @property
    def head_is_tied(self) -> bool:
        return self.checkpoint.head_is_tied

    def files(self) -> list[Path]:
        return sorted(
            file
            for file in self.checkpoint.path.iterdir()
            if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_WEIGHT_FILES)
        )

    def read(self, name: str) -> Tensor:
        return self.checkpoint.entry(name).read()

    def has(self, name: str) -> bool:
        return name in self.checkpoint.entries


def open_source(path: Path, scratch: Path) -> Source:
    """Open a folder or a `.gguf` file; `scratch` takes the small files that a GGUF holds as metadata.

    Raises InvalidRequestError when `path` is neither, CheckpointError for what cannot be encoded.
    """
    if path.is_dir():
        checkpoint = open_checkpoint(path)
        quantized = next((name for name in sorted(checkpoint.entries) if name.endswith(".trellis")), None)
        if quantized is not None:
            raise CheckpointError(
                f"{checkpoint.entries[quantized].file}: {quantized}: is EXL3 already; encode the original weights"
            )
        return FolderSource(checkpoint)
    if path.is_file() and path.suffix == ".gguf":
        return open_gguf(path, scratch)
    raise InvalidRequestError(f"source: {path} is neither a folder nor a .gguf file", param="source")
