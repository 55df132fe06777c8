"""Which tensors a random checkpoint has, and the numbers in them: a function of (seed, name, place), whoever makes them and in what order.

Any bits are a valid trellis, and its codes decode to numbers of mean 0 and a known standard deviation s. Rotations keep lengths, so inputs of
variance 1 times `suh` of mean square 1 give sums of variance in * s^2, and `svh` of root mean square 1 / (s sqrt(in)) makes outputs of
variance 1. Norms keep the inputs of linears at variance 1, so logits have it too.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from espalier.kernels.exl3 import codebook as codebooks
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import TILE, words_of_rate
from espalier.replicas.model.families import LinearSpec, NetworkSpec

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Fill = Callable[[np.random.Generator, int], Bytes]  # (random numbers, count of bytes) -> the bytes

PLAIN_BITS = 16
# Numbers of a tensor are made in pieces of so many bytes, each from a generator of its own.
PIECE_BYTES = 16 << 20
# Of the heads' norms: scores of this spread squared make attention look at a few tokens, not at all alike.
_HEAD_NORM = 1.6


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """dtype: as safetensors spells it. fill: makes its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fill: Fill

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * (4 if self.dtype == "I32" else 2)

    def piece(self, seed: int, begin: int) -> Bytes:
        """Its bytes from `begin`, a multiple of PIECE_BYTES, on: PIECE_BYTES of them, or what is left."""
        draw = np.random.Generator(np.random.SFC64([seed, zlib.crc32(self.name.encode()), begin // PIECE_BYTES]))
        return self.fill(draw, min(PIECE_BYTES, self.num_bytes - begin))


@dataclass(frozen=True, slots=True)
class RandomModule:
    """A module of the network by its key. bits: of an EXL3 linear, None for what is plain."""

    key: str
    tensors: tuple[RandomTensor, ...]
    bits: float | None


def random_modules(spec: NetworkSpec, bits: float, head_bits: float, codebook: Codebook) -> list[RandomModule]:
    """Every module, in order of computation. All widths must be multiples of 128. head_bits 16: a plain head."""
    modules = [_plain(spec.embedding, (spec.vocab_size, spec.hidden_size), _normal(0.0, 1.0))]
    for layer in spec.layers:
        for vector in layer.vectors:
            mean = _HEAD_NORM if vector in (layer.q_norm, layer.k_norm) else 1.0
            modules.append(_plain(vector.name, (vector.size,), _normal(mean, 0.1)))
        modules += [_exl3(linear, bits, codebook) for linear in layer.linears]
    modules.append(_plain(spec.final_norm.name, (spec.final_norm.size,), _normal(1.0, 0.1)))
    head = spec.head
    if head_bits == PLAIN_BITS:
        spread = head.in_features**-0.5
        modules.append(_plain(f"{head.key}.weight", (head.out_features, head.in_features), _normal(0.0, spread)))
    else:
        modules.append(_exl3(head, head_bits, codebook))
    return modules


def _plain(name: str, shape: tuple[int, ...], fill: Fill) -> RandomModule:
    return RandomModule(name.rpartition(".")[0], (RandomTensor(name, "F16", shape, fill),), None)


def _exl3(linear: LinearSpec, bits: float, codebook: Codebook) -> RandomModule:
    key, num_in, num_out = linear.key, linear.in_features, linear.out_features
    spread = float(codebooks.values(codebook).to(torch.float64).std())
    tensors = [
        RandomTensor(f"{key}.trellis", "I16", (num_in // TILE, num_out // TILE, words_of_rate(bits)), _random_bits),
        RandomTensor(f"{key}.suh", "F16", (num_in,), _signed_scales(1.0)),
        RandomTensor(f"{key}.svh", "F16", (num_out,), _signed_scales(1.0 / (spread * math.sqrt(num_in)))),
    ]
    if codebook.marker is not None:
        tensors.append(RandomTensor(f"{key}.{codebook}", "I32", (), _constant(codebook.marker)))
    return RandomModule(key, tuple(tensors), bits)


def _random_bits(draw: np.random.Generator, count: int) -> Bytes:
    words = draw.integers(0, 1 << 64, -(-count // 8), dtype=np.uint64)
    return words.view(np.uint8)[:count]


def _normal(mean: float, spread: float) -> Fill:
    def fill(draw: np.random.Generator, count: int) -> Bytes:
        numbers = draw.standard_normal(count // 2, dtype=np.float32)
        numbers *= np.float32(spread)
        numbers += np.float32(mean)
        return numbers.astype(np.float16).view(np.uint8)

    return fill


def _signed_scales(root_mean_square: float) -> Fill:
    """Of both signs, and of sizes between the half and three times that, so that a scale at the wrong place shows."""
    lowest, highest = 0.5, 1.5
    # The mean square between two bounds is (a^2 + ab + b^2) / 3.
    unit = root_mean_square / math.sqrt((lowest**2 + lowest * highest + highest**2) / 3)

    def fill(draw: np.random.Generator, count: int) -> Bytes:
        sizes = draw.uniform(lowest, highest, count // 2) * unit
        signs = draw.integers(0, 2, count // 2) * 2 - 1
        return (sizes * signs).astype(np.float16).view(np.uint8)

    return fill


def _constant(value: int) -> Fill:
    return lambda draw, count: np.array([value], dtype="<i4").view(np.uint8)
