"""Blocked linears: right, and each row's and column's bits its own."""

import itertools

import pytest
import torch

from espalier.kernels.linear.blocked import batched_product, blocked_linear, num_column_blocks, pack_columns

SHAPES = [(128, 128), (576, 640), (640, 1536), (1536, 640), (100, 200), (4864, 896)]


def matrices(rows: int, in_features: int, out_features: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(in_features * 7 + out_features)
    return torch.randn(rows, in_features, generator=generator), torch.randn(
        in_features, out_features, generator=generator
    )


@pytest.fixture(params=[1, 2], ids="threads{}".format)
def threads(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_matches_the_product(in_features: int, out_features: int) -> None:
    x, weight = matrices(24, in_features, out_features)
    y = blocked_linear(x, pack_columns(weight))
    assert y.shape == (24, num_column_blocks(out_features) * 128)
    exact = x.double() @ weight.double()
    assert (y[:, :out_features] - exact).norm() <= 1e-6 * exact.norm()
    assert not y[:, out_features:].any()


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_a_rows_bits_are_its_own(in_features: int, out_features: int, threads: int) -> None:
    x, weight = matrices(64, in_features, out_features)
    packed = pack_columns(weight)
    whole = blocked_linear(x, packed)
    for row, place in ((0, 0), (13, 0), (13, 7), (40, 3), (63, 5)):
        block = torch.full((8, in_features), 1e20)
        block[place] = x[row]
        assert torch.equal(blocked_linear(block, packed)[place], whole[row])
    shuffle = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    assert torch.equal(blocked_linear(x[shuffle], packed), whole[shuffle])
    torch.set_num_threads(1)
    assert torch.equal(blocked_linear(x, packed), whole)


@pytest.mark.parametrize("rows", [8, 24])
@pytest.mark.parametrize(("in_features", "out_features"), [(640, 1536), (1536, 1024), (576, 512)])
def test_whole_equals_halves_and_quarters(in_features: int, out_features: int, rows: int, threads: int) -> None:
    x, weight = matrices(rows, in_features, out_features)
    whole = blocked_linear(x, pack_columns(weight))
    for parts in (2, 4):
        split = [blocked_linear(x, pack_columns(part)) for part in weight.chunk(parts, 1)]
        assert torch.equal(torch.cat(split, 1), whole)


def test_a_plain_half_width_product_has_other_bits() -> None:
    """Why all this: without fixed shapes, a linear cut in halves is another linear on most machines."""
    for rows, in_features, out_features in itertools.product((1, 3, 8, 17), (128, 640, 1536), (192, 640, 1000, 1536)):
        x, weight = matrices(rows, in_features, out_features)
        halves = torch.cat([x @ part.contiguous() for part in weight.chunk(2, 1)], 1)
        if not torch.equal(halves, x @ weight):
            return
    pytest.skip("this machine's BLAS gives the same bits at any width tried")


def test_a_batch_of_one_has_the_bits_of_a_batch(threads: int) -> None:
    """A library may cut the sum of a lone product between its threads."""
    a, b = torch.randn(4, 8, 8192), torch.randn(4, 8192, 128)
    assert torch.equal(batched_product(a[:1], b[:1]), batched_product(a, b)[:1])
