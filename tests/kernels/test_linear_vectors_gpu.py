"""EXL3 linears on the GPU against float64 and against exllamav3's own outputs, at 1, 3, 17 and 64 rows, every rate and codebook.

By the public API and in plain Triton; that every form has the same bits is said by the tests of the forms.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.layout import RATES, Exl3Tensors
from espalier.kernels.exl3.reference import linear_fp64
from espalier.kernels.linear.dispatch import Form
from espalier.kernels.linear.exl3_linear import exl3_linear
from espalier.kernels.linear.group import pack_group
from tests.support.linears import move, random_linear, relative_error, run_form, workspace

pytestmark = pytest.mark.gpu

DATA = Path(__file__).parents[1] / "data" / "vectors"
ACCURACY = 4.6e-4  # exllamav3's fp16 path, set by the rounding of the rotated input
ROWS = (1, 3, 17, 64)
CASES = [(rate, Codebook.MUL1) for rate in RATES]
CASES += [(rate, codebook) for rate in (1.0, 3.0, 4.0, 6.0, 8.0) for codebook in (Codebook.MCG, Codebook.THREE_INST)]


def test_exllamav3s_outputs() -> None:
    vectors = load_file(DATA / "exl3.safetensors") | load_file(DATA / "exl3_rows.safetensors")
    names = sorted({name.partition(".y_linear.")[0] for name in vectors if ".y_linear.m64" in name})
    assert len(names) == 4
    for name in names:
        case = Exl3Tensors(
            vectors[f"{name}.trellis"], vectors[f"{name}.suh"], vectors[f"{name}.svh"], Codebook(name.partition(".")[0])
        )
        group = pack_group([move(case, "cuda")], [None])
        for rows in ROWS:
            x = vectors[f"x.m{rows}"]
            out = torch.full((rows, 128), torch.nan, dtype=torch.float32, device="cuda")
            exl3_linear(x.cuda(), group, out=out, **workspace(group, rows))
            assert relative_error(out.cpu(), linear_fp64(x, case)) < ACCURACY, (name, rows)
            # Their outputs are fp16, and of three or fewer rows from fp16 accumulators.
            assert relative_error(out.cpu(), vectors[f"{name}.y_linear.m{rows}"]) < 6e-4, (name, rows)


@pytest.mark.parametrize(("rate", "codebook"), CASES, ids=lambda value: f"{value}")
def test_every_rate_within_the_stated_error(rate: float, codebook: Codebook) -> None:
    case, bias = random_linear(640, 256, rate, codebook), torch.randn(256)
    x = torch.randn(64, 640).half()
    exact = linear_fp64(x, case, bias)
    group = pack_group([move(case, "cuda")], [bias.cuda()])
    for rows in ROWS:
        out = torch.full((rows, 256), torch.nan, dtype=torch.float32, device="cuda")
        exl3_linear(x[:rows].cuda(), group, out=out, **workspace(group, rows))
        assert relative_error(out.cpu(), exact[:rows]) < ACCURACY, rows
    assert relative_error(run_form(Form.PLAIN, x.cuda(), group, torch.float32).cpu(), exact) < ACCURACY
