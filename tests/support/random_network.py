"""A network of random EXL3 weights made in a GPU's own memory, and a track that runs rounds of it whose every bit can be looked at."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

from espalier.deploy.random_model.shapes import Shape
from espalier.kernels.exl3 import codebook as codebooks
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.linear.group import LinearGroup, Run
from espalier.kernels.rope.frequencies import inverse_frequencies
from espalier.kernels.rope.reference import rope_table
from espalier.replicas.gpu.kv import DeviceKV
from espalier.replicas.gpu.network import GpuLayer, GpuNetwork
from espalier.replicas.gpu.round import Model
from espalier.replicas.gpu.rounds import RoundShapes
from espalier.replicas.gpu.state import SlotState, sampling_limits
from espalier.replicas.gpu.track import LaneInput, RoundInput, Track
from espalier.replicas.model.config import ModelConfig

BLOCK_SIZE = 16


def model_config(shape: Shape, layers: int) -> ModelConfig:
    """As a checkpoint of this shape would say it."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(replace(shape, num_layers=layers).config()))
        return ModelConfig.from_checkpoint(Path(folder))


def random_group(inputs: int, widths: Sequence[int], bits: float, device: torch.device) -> LinearGroup:
    """Outputs have about the variance of the inputs, as in `deploy/random_model/tensors.py`."""
    outputs = sum(widths)
    spread = float(codebooks.values(Codebook.MUL1).double().std()) * math.sqrt(inputs)
    shape = (inputs // 64, outputs // 16, int(32 * bits))
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)
    return LinearGroup(
        in_features=inputs,
        widths=tuple(widths),
        runs=(Run(0, outputs, bits, Codebook.MUL1, words),),
        suh=_signed(len(widths), inputs, device=device),
        svh=_signed(outputs, device=device) / spread,
        bias=None,
    )


def _signed(*shape: int, device: torch.device) -> Tensor:
    sizes = torch.rand(shape, device=device) + 0.5
    return (sizes * torch.where(torch.rand(shape, device=device) < 0.5, -1.0, 1.0)).half()


def random_network(
    config: ModelConfig, bits: float, head_bits: float, context: int, device: torch.device
) -> GpuNetwork:
    """Numbers from torch's global seed."""

    def norm(size: int, mean: float = 1.0) -> Tensor:
        return mean + 0.1 * torch.randn(size, device=device)

    hidden, heads, kv_heads = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    layers = tuple(
        GpuLayer(
            input_norm=norm(hidden),
            qkv=random_group(hidden, (heads, kv_heads, kv_heads), bits, device),
            q_norm=norm(config.head_dim, 1.6),
            k_norm=norm(config.head_dim, 1.6),
            attention_out=random_group(heads, (hidden,), bits, device),
            mlp_norm=norm(hidden),
            gate_up=random_group(hidden, (config.intermediate_size,) * 2, bits, device),
            down=random_group(config.intermediate_size, (hidden,), bits, device),
        )
        for _ in range(config.num_layers)
    )
    cos, sin = rope_table(inverse_frequencies(config.rope, config.head_dim), context, config.rope.cos_sin_scale)
    return GpuNetwork(
        config=config,
        embedding=torch.randn(config.vocab_size, hidden, device=device, dtype=torch.float16),
        layers=layers,
        final_norm=norm(hidden),
        head=random_group(hidden, (config.vocab_size,), head_bits, device),
        cos=cos.to(device),
        sin=sin.to(device),
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one sequence (its slot) in a round: positions start, start + 1, ... The last row's logits are kept."""

    slot: int
    start: int
    tokens: tuple[int, ...]


class NetworkRuns:
    """Slot i's positions lie in blocks i * n, i * n + 1, ... of the cache, which begins with random numbers."""

    def __init__(self, network: GpuNetwork, shapes: RoundShapes, num_slots: int, device: torch.device) -> None:
        config = network.config
        context = shapes.contexts[-1]
        blocks = -(-context // BLOCK_SIZE)
        self.kv = DeviceKV(config, num_slots * blocks, BLOCK_SIZE, torch.float16, device)
        for cache in (*self.kv.keys, *self.kv.values):
            cache.normal_()
        state = SlotState(num_slots, blocks, sampling_limits(config.vocab_size, 1), device)
        state.tables.copy_(torch.arange(num_slots * blocks, device=device).view(num_slots, blocks))
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        self.track = Track(Model(network, self.kv, state), shapes, BLOCK_SIZE, device, stream)
        self._blocks = blocks

    def prepare(self, *, graphs: bool) -> None:
        self.track.prepare(graphs=graphs)

    def run(self, rows: Sequence[Rows], *, greedy: bool = True) -> Tensor:
        """fp32 [lanes, vocab]: what the buffers hold after the round; gone with the next."""
        lanes = [LaneInput(lane.slot, lane.start, lane.tokens, True, False) for lane in rows]
        self.track.launch(RoundInput(lanes, np.empty((0, 2), dtype=np.int32), greedy=greedy)).wait()
        return self.track._buffers.activations.logits[: len(rows)]

    def cache_of(self, slot: int, positions: int) -> Tensor:
        """fp16 [layers, 2, blocks, kv_heads, block_size, head_dim] of a slot's first positions; what lies behind them reads as zero."""
        first, count = slot * self._blocks, -(-positions // BLOCK_SIZE)
        parts = [torch.stack(pair)[:, first : first + count] for pair in zip(self.kv.keys, self.kv.values, strict=True)]
        whole = torch.stack(parts)
        if positions % BLOCK_SIZE:
            whole[:, :, -1, :, positions % BLOCK_SIZE :] = 0
        return whole
