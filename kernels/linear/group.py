"""LinearGroup: EXL3 linears that read one input, packed for one launch. Knows neither kernels nor checkpoints.

q, k and v, or gate and up, each have their own input scales, rate and codebook; their outputs stand side by side in one row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import Exl3Tensors
from espalier.kernels.exl3.pack import pack_trellis


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring columns of one rate and codebook, packed as one trellis.

    first_column, columns: multiples of 128. words: int32 [in/64, columns/16, 32 * rate] (`exl3/pack.py`).
    """

    first_column: int
    columns: int
    rate: float
    codebook: Codebook
    words: Tensor


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """Linears side by side.

    in_features: padded input width. widths: padded output width of each member, multiples of 128, in order.
    suh: fp16 [members, in]. svh: fp16 [out]. bias: fp32 [out] (zeros for members without one), or None. out is the sum of widths.
    """

    in_features: int
    widths: tuple[int, ...]
    runs: tuple[Run, ...]
    suh: Tensor
    svh: Tensor
    bias: Tensor | None

    @property
    def out_features(self) -> int:
        return sum(self.widths)

    @property
    def num_members(self) -> int:
        return len(self.widths)


def pack_group(members: Sequence[Exl3Tensors], biases: Sequence[Tensor | None]) -> LinearGroup:
    """Packs linears of one input width on their own device. biases: [out] each, or None.

    Raises ValueError when the input widths differ.
    """
    assert members and len(members) == len(biases)
    in_features = members[0].in_features
    if any(member.in_features != in_features for member in members):
        raise ValueError(f"linears of one input differ in its width: {[member.in_features for member in members]}")
    bias = None
    if any(part is not None for part in biases):
        parts = [
            member.svh.new_zeros(member.out_features, dtype=torch.float32) if part is None else part.float()
            for member, part in zip(members, biases, strict=True)
        ]
        bias = torch.cat(parts)
    return LinearGroup(
        in_features=in_features,
        widths=tuple(member.out_features for member in members),
        runs=_runs(members),
        suh=torch.stack([member.suh for member in members]),
        svh=torch.cat([member.svh for member in members]),
        bias=bias,
    )


def _runs(members: Sequence[Exl3Tensors]) -> tuple[Run, ...]:
    runs: list[Run] = []
    start = 0
    while start < len(members):
        first = members[start]
        end = start + 1
        while end < len(members) and (members[end].rate, members[end].codebook) == (first.rate, first.codebook):
            end += 1
        trellis = torch.cat([member.trellis for member in members[start:end]], dim=1)
        column = sum(member.out_features for member in members[:start])
        words = pack_trellis(trellis)
        runs.append(Run(column, int(trellis.shape[1]) * 16, first.rate, first.codebook, words))
        start = end
    return tuple(runs)
