"""ExpertGroup: the same linears of every expert, stacked, so that one launch serves whichever are chosen. Knows neither kernels nor routing."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.linear.group import LinearGroup


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Members (gate and up, or down alone) of equal width, rate and codebook in all experts.

    in_features: padded input width. member_width: padded output width of one member, a multiple of 128. words: int32
    [experts, in/64, out/16, 32 * rate] contiguous, out = members * member_width. suh: fp16 [experts, members, in]. svh: fp16
    [experts, out]. bias: fp32 [experts, out] or None.
    """

    in_features: int
    member_width: int
    rate: float
    codebook: Codebook
    words: Tensor
    suh: Tensor
    svh: Tensor
    bias: Tensor | None

    @property
    def num_experts(self) -> int:
        return int(self.words.shape[0])

    @property
    def num_members(self) -> int:
        return int(self.suh.shape[1])

    @property
    def out_features(self) -> int:
        return self.num_members * self.member_width


def stack_experts(groups: Sequence[LinearGroup]) -> ExpertGroup:
    """One group an expert, each the same linears, on their own device.

    Raises ValueError where one launch could not serve them all: other widths, rates or codebooks, or a bias that only some have.
    """
    first = groups[0]
    kinds = {(group.in_features, group.widths) for group in groups}
    if len(kinds) > 1 or len(set(first.widths)) > 1:
        raise ValueError(f"experts differ in their widths (in, outs): {sorted(kinds)}")
    rates = {(run.rate, str(run.codebook)) for group in groups for run in group.runs}
    if len(rates) > 1:
        raise ValueError(f"experts of several rates or codebooks: {sorted(rates)}; one launch serves one")
    biases = [group.bias for group in groups if group.bias is not None]
    if len(biases) not in (0, len(groups)):
        raise ValueError(f"a bias in {len(biases)} of {len(groups)} experts; all or none")
    run = first.runs[0]
    return ExpertGroup(
        in_features=first.in_features,
        member_width=first.widths[0],
        rate=run.rate,
        codebook=run.codebook,
        words=torch.stack([group.runs[0].words for group in groups]),
        suh=torch.stack([group.suh for group in groups]),
        svh=torch.stack([group.svh for group in groups]),
        bias=torch.stack(biases) if biases else None,
    )
