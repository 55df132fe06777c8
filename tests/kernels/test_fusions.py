"""Fused launches against the unfused sequence of references, bit for bit."""

import pytest
import torch

from espalier.kernels.activation.reference import silu_mul_ieee
from espalier.kernels.hadamard.reference import rotate_input
from espalier.kernels.norm.reference import rms_norm_ieee
from tests.support.bits import captured, poisoned, same_bits
from tests.support.interpret import interpreted

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def check_norm(
    device: str,
    y_dtype: torch.dtype | None,
    members: int,
    rows: int,
    width: int,
    in_features: int,
    unit_offset: bool = False,
) -> None:
    from espalier.kernels.norm.add_norm_rotate import add_norm_rotate

    residual = torch.randn(rows, width) * 3
    y = None if y_dtype is None else torch.randn(rows, width + 8).to(y_dtype)[:, :width]
    weight, suh = torch.rand(width).half(), torch.randn(members, in_features).half()
    total = poisoned(rows, width, device=device)
    normed = poisoned(rows, width, dtype=torch.float16, device=device)
    rotated = poisoned(members, rows, in_features, dtype=torch.float16, device=device)
    add_norm_rotate(
        residual.to(device),
        None if y is None else y.to(device),
        weight.to(device),
        1e-6,
        suh.to(device) if members else None,
        total=None if y is None else total,
        normed=normed,
        rotated=rotated if members else None,
        unit_offset=unit_offset,
    )
    x = residual if y is None else residual + y.float()
    wanted = rms_norm_ieee(x, weight, 1e-6, unit_offset=unit_offset)
    assert y is None or same_bits(total, x)
    assert same_bits(normed, wanted.half())
    for member in range(members):
        assert same_bits(rotated[member], rotate_input(wanted, suh[member]))


def check_silu(device: str, dtype: torch.dtype, rows: int, width: int, in_features: int) -> None:
    from espalier.kernels.activation.silu_mul import silu_mul
    from espalier.kernels.activation.silu_mul_rotate import silu_mul_rotate

    gate_up, suh = (torch.randn(rows, 2 * width) * 20).to(dtype), torch.randn(1, in_features).half()
    wanted = silu_mul_ieee(gate_up[:, :width], gate_up[:, width:])
    out = poisoned(rows, width, device=device)
    silu_mul(gate_up.to(device), out)
    assert same_bits(out, wanted)
    rotated = poisoned(1, rows, in_features, dtype=torch.float16, device=device)
    silu_mul_rotate(gate_up.to(device), suh.to(device), rotated)
    assert same_bits(rotated[0], rotate_input(wanted, suh[0]))


@pytest.mark.parametrize("y_dtype", [None, *FLOATS])
@pytest.mark.parametrize("shape", [(2, 1, 256, 256), (1, 3, 192, 256), (0, 2, 72, 128)])
@interpreted
def test_norm_interpreted(y_dtype: torch.dtype | None, shape: tuple[int, int, int, int]) -> None:
    check_norm("cpu", y_dtype, *shape, unit_offset=shape[1] == 1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 128, 128), (35, 72, 128), (67, 128, 128)])
@interpreted
def test_silu_interpreted(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    check_silu("cpu", dtype, *shape)


@interpreted
def test_whole_rows_interpreted() -> None:
    """As with many rows: a program goes through the tiles of a row."""
    from espalier.kernels.norm import add_norm_rotate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(add_norm_rotate, "_SPREAD_ROWS", 0)
        check_norm("cpu", torch.float16, 2, 2, 2304, 2304)
        check_norm("cpu", None, 1, 1, 256, 256)


@interpreted
def test_the_residual_is_not_overwritten() -> None:
    from espalier.kernels.norm.add_norm_rotate import add_norm_rotate

    x = torch.zeros(2, 128)
    with pytest.raises(ValueError, match="total must not be residual"):
        add_norm_rotate(x, torch.zeros(2, 128), torch.ones(128), 1e-6, None, total=x, normed=torch.zeros(2, 128))


def test_silu_is_within_two_ulp_of_the_exact_one() -> None:
    gate, up = torch.randn(4000) * 30, torch.ones(4000)
    exact = gate.double() * torch.sigmoid(gate.double())
    torch.testing.assert_close(silu_mul_ieee(gate, up).double(), exact, rtol=4e-7, atol=1e-35)


@pytest.mark.gpu
@pytest.mark.parametrize("y_dtype", [None, *FLOATS])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 1, 5120, 5120),
        (1, 63, 5100, 5120),
        (3, 300, 5120, 5120),
        (2, 130, 576, 640),
        (1, 2, 17408, 17408),
        (0, 70, 4096, 4096),
    ],
)
def test_norm(y_dtype: torch.dtype | None, shape: tuple[int, int, int, int]) -> None:
    check_norm("cuda", y_dtype, *shape, unit_offset=shape[1] % 2 == 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 17408, 17408), (31, 5100, 5120), (100, 17408, 17408), (1000, 1536, 1536)])
def test_silu(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    check_silu("cuda", dtype, *shape)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_silu_of_every_kind_of_number(dtype: torch.dtype) -> None:
    from espalier.kernels.activation.silu_mul import silu_mul

    every_half = torch.arange(-32768, 32768).short()
    ends = torch.tensor([1e-45, 86.5, 88.375, 88.38, 3e38, 1e-38])
    gate = torch.cat([every_half.view(torch.float16).float(), ends, -ends, torch.randn(100_000) * 40])
    # Every number of a 16-bit dtype; small ups make products below what fp32 holds exactly.
    gate = gate if dtype == torch.float32 else every_half.view(dtype)
    for up in (torch.ones(len(gate)), torch.randn(len(gate)), torch.full((len(gate),), 6e-8)):
        gate_up = torch.cat([gate, up.to(dtype)]).unsqueeze(0)
        out = poisoned(1, len(gate), device="cuda")
        silu_mul(gate_up.cuda(), out)
        assert same_bits(out[0], silu_mul_ieee(gate, up.to(dtype)))


@pytest.mark.gpu
def test_no_row_depends_on_the_call() -> None:
    from espalier.kernels.activation.silu_mul_rotate import silu_mul_rotate
    from espalier.kernels.norm.add_norm_rotate import add_norm_rotate

    rows, width = 1000, 5120
    residual, y = torch.randn(rows, width, device="cuda"), torch.randn(rows, width, device="cuda")
    weight, suh = torch.rand(width, device="cuda"), torch.randn(2, width, device="cuda").half()
    half_suh = suh[:1, : width // 2].contiguous()

    def run(first: int, last: int, graph: bool) -> list[torch.Tensor]:
        total = poisoned(last - first, width, device="cuda")
        rotated = poisoned(2, last - first, width, dtype=torch.float16, device="cuda")
        gated = poisoned(1, last - first, width // 2, dtype=torch.float16, device="cuda")

        def call() -> None:
            add_norm_rotate(residual[first:last], y[first:last], weight, 1e-6, suh, total=total, rotated=rotated)
            silu_mul_rotate(y[first:last], half_suh, gated)

        if graph:
            return captured(call, [total, rotated, gated])
        call()
        return [total, rotated, gated]

    whole = run(0, rows, graph=False)
    for first, last in ((0, 1), (200, 201), (7, 24), (100, 164), (100, 165), (300, 556), (300, 557), (999, 1000)):
        for graph in (False, True):
            total, rotated, gated = run(first, last, graph)
            assert same_bits(total, whole[0][first:last])
            assert same_bits(rotated, whole[1][:, first:last])
            assert same_bits(gated, whole[2][:, first:last])
