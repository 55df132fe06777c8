"""Activations: the buffers that one track's rounds are computed in, for up to so many rows. Knows widths; no weights, no launches.

One round runs at a time on a track, and layers run one after the other, so each kind of buffer exists once.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from espalier.kernels.linear.group import LinearGroup
from espalier.replicas.model.config import ModelConfig

_BLOCK = 128  # linears' widths are padded to its multiples
_HALF, _FULL = torch.float16, torch.float32


@dataclass(frozen=True, slots=True)
class ActivationShape:
    """max_rows: rows of a round. max_samples: rows of it that are sampled from. kv_dtype: type that queries are rounded to."""

    config: ModelConfig
    max_rows: int
    max_samples: int
    kv_dtype: torch.dtype

    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and type of each buffer, by name; what `Activations` allocates and the memory plan counts."""
        config, rows, samples = self.config, self.max_rows, self.max_samples
        hidden, inner = _padded(config.hidden_size), _padded(config.intermediate_size)
        heads = (config.num_heads, config.head_dim)
        q_width, kv_width = _padded(prod(heads)), _padded(config.num_kv_heads * config.head_dim)
        widest = max(3 * hidden, q_width, inner)
        return {
            "residual_0": ((rows, config.hidden_size), _FULL),
            "residual_1": ((rows, config.hidden_size), _FULL),
            "rotated": ((rows * widest,), _HALF),
            "normed": ((rows, config.hidden_size), _FULL),
            "qkv": ((rows, q_width + 2 * kv_width), _HALF),
            "q": ((rows, *heads), self.kv_dtype),
            "attended": ((rows, *heads), _FULL),
            "added": ((rows, hidden), _FULL),
            "gate_up": ((rows, 2 * inner), _HALF),
            "activated": ((rows, inner), _FULL),
            "sampled_0": ((samples, config.hidden_size), _FULL),
            "sampled_1": ((samples, config.hidden_size), _FULL),
            "sampled_added": ((samples, hidden), _FULL),
            "sampled_normed": ((samples, config.hidden_size), _FULL),
            "logits": ((samples, _padded(config.vocab_size)), _FULL),
        }

    @property
    def num_bytes(self) -> int:
        """Of device memory, all buffers together."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.parts().values())


@dataclass(frozen=True, slots=True)
class StreamBuffers:
    """Of a residual stream: sum goes from one buffer to the other; normed: input of plain linears. All fp32 [rows, hidden]."""

    first: Tensor
    second: Tensor
    normed: Tensor


class Activations:
    """The buffers, zeros at first: a padding row's numbers are finite from the beginning. Names and shapes as in `ActivationShape.parts`.

    rows: of the residual stream of all rows. samples: of the sampled rows' own.
    """

    def __init__(self, shape: ActivationShape, device: torch.device) -> None:
        parts = {name: torch.zeros(size, dtype=dtype, device=device) for name, (size, dtype) in shape.parts().items()}
        self.rows = StreamBuffers(parts["residual_0"], parts["residual_1"], parts["normed"])
        self.samples = StreamBuffers(parts["sampled_0"], parts["sampled_1"], parts["sampled_normed"])
        self.rotated, self.qkv, self.q, self.attended = (parts[name] for name in ("rotated", "qkv", "q", "attended"))
        self.added, self.sampled_added = parts["added"], parts["sampled_added"]
        self.gate_up, self.activated, self.logits = parts["gate_up"], parts["activated"], parts["logits"]

    def rotated_for(self, group: LinearGroup, rows: int) -> Tensor:
        """fp16 [members, rows, in]: where the rotated inputs of a group go."""
        shape = (group.num_members, rows, group.in_features)
        return self.rotated[: prod(shape)].view(shape)


def _padded(width: int) -> int:
    return -(-width // _BLOCK) * _BLOCK
