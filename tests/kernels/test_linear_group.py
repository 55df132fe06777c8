"""Groups: members side by side, neighbours of one rate and codebook packed as one run."""

import pytest
import torch

from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.pack import unpack_words
from espalier.kernels.linear.group import pack_group
from tests.support.linears import random_linear


def test_equal_neighbours_become_one_run() -> None:
    members = [
        random_linear(256, 256, 4.0, Codebook.MUL1, 0),
        random_linear(256, 128, 4.0, Codebook.MUL1, 1),
        random_linear(256, 128, 4.0, Codebook.MCG, 2),
        random_linear(256, 384, 2.5, Codebook.MUL1, 3),
    ]
    group = pack_group(members, [None] * 4)
    assert group.widths == (256, 128, 128, 384)
    assert (group.out_features, group.num_members, group.bias) == (896, 4, None)
    runs = [(run.first_column, run.columns, run.rate, run.codebook) for run in group.runs]
    assert runs == [(0, 384, 4.0, Codebook.MUL1), (384, 128, 4.0, Codebook.MCG), (512, 384, 2.5, Codebook.MUL1)]
    trellises = [member.trellis for member in members]
    assert torch.equal(unpack_words(group.runs[0].words), torch.cat(trellises[:2], dim=1))
    assert torch.equal(unpack_words(group.runs[1].words), trellises[2])
    assert torch.equal(unpack_words(group.runs[2].words), trellises[3])
    assert [tuple(run.words.shape) for run in group.runs] == [(4, 24, 128), (4, 8, 128), (4, 24, 80)]
    for index, member in enumerate(members):
        assert torch.equal(group.suh[index], member.suh)
    assert torch.equal(group.svh, torch.cat([member.svh for member in members]))


def test_members_without_a_bias_get_zeros_beside_one_with() -> None:
    members = [random_linear(128, 128, 4.0, Codebook.MUL1, seed) for seed in range(3)]
    bias = torch.randn(128).half()
    group = pack_group(members, [None, bias, None])
    assert group.bias is not None
    assert group.bias.dtype == torch.float32
    assert torch.equal(group.bias, torch.cat([torch.zeros(128), bias.float(), torch.zeros(128)]))


def test_different_input_widths_are_refused() -> None:
    members = [random_linear(width, 128, 4.0, Codebook.MUL1) for width in (128, 256)]
    with pytest.raises(ValueError, match=r"width: \[128, 256\]"):
        pack_group(members, [None, None])
