"""Does this machine's arithmetic keep a row's bits to itself? Checked once at load, with the model's own shapes.

What `kernels/linear/blocked.py`, `kernels/attention` and `kernels/activation` rely on: a product's bits depend on neither the row's place
in its block, nor the other rows, nor the batch around it, nor the number of threads; exp's bits depend on no place. An order of sums does
not depend on the numbers summed, so equal bits on rough numbers are good evidence. The bits themselves, digested, name this arithmetic.
"""

import contextlib
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from espalier.kernels.attention.plan import KEY_SPLIT, QUERY_TILE
from espalier.kernels.linear.blocked import COLUMN_BLOCK, ROW_BLOCK, batched_product, blocked_linear
from espalier.replicas.errors import EngineError
from espalier.replicas.model.decoder import Decoder

# Enough column and row blocks to meet every way in which a library shares out a batch among a few threads.
_MAX_BLOCKS = 16
_ROW_BLOCKS = 17


def check_row_invariance(decoder: Decoder) -> str:
    """Eight hex digits that name this machine's arithmetic on this model's shapes. Raises EngineError if it is not row-invariant."""
    digest = 0
    config = decoder.config
    linears = {linear.weight.shape[:2] for layer in decoder.layers for linear in (layer.qkv, layer.gate_up, layer.down)}
    linears |= {layer.attention_out.weight.shape[:2] for layer in decoder.layers} | {decoder.head.weight.shape[:2]}
    for blocks, in_features in sorted(linears):
        digest = zlib.crc32(_check_linear(in_features, min(blocks, _MAX_BLOCKS)), digest)
    tile_rows = QUERY_TILE * config.num_heads // config.num_kv_heads
    for rows, inner, columns in ((tile_rows, config.head_dim, KEY_SPLIT), (tile_rows, KEY_SPLIT, config.head_dim)):
        digest = zlib.crc32(_check_products(rows, inner, columns), digest)
    digest = zlib.crc32(_check_exp(), digest)
    return f"{digest:08x}"


def rough(*shape: int, seed: int) -> Tensor:
    """fp32 numbers in [-1, 1) that look random, the same on every machine and in every version."""
    n = 1
    for size in shape:
        n *= size
    words = (torch.arange(n, dtype=torch.int64) + seed * 1_000_003) * 2_654_435_761 % 2**32
    words = (words ^ (words >> 15)) * 2_246_822_519 % 2**32
    return ((words ^ (words >> 13)) >> 8).to(torch.float32).mul_(2.0**-23).sub_(1.0).view(shape)


def _check_linear(in_features: int, blocks: int) -> bytes:
    name = f"a linear of {in_features} inputs"
    weight = rough(blocks, in_features, COLUMN_BLOCK, seed=1)
    x = rough(_ROW_BLOCKS * ROW_BLOCK, in_features, seed=2)
    whole = blocked_linear(x, weight)
    block = whole[:ROW_BLOCK]
    _require(torch.equal(_one_by_one(x[:ROW_BLOCK], weight), block), name, "the batch or the number of threads")
    _require(torch.equal(blocked_linear(x[:ROW_BLOCK], weight), block), name, "the number of row blocks")
    for shift in range(1, ROW_BLOCK):
        rolled = blocked_linear(x[:ROW_BLOCK].roll(shift, 0), weight)
        _require(torch.equal(rolled, block.roll(shift, 0)), name, "the row's place")
    _require(torch.equal(blocked_linear(x.flip(0), weight), whole.flip(0)), name, "the order of rows")
    alone = torch.zeros(ROW_BLOCK, in_features)
    alone[3] = x[3]
    _require(torch.equal(blocked_linear(alone, weight)[3], block[3]), name, "the other rows")
    half = -(-blocks // 2)
    parts = (
        [blocked_linear(x[:ROW_BLOCK], weight[:half]), blocked_linear(x[:ROW_BLOCK], weight[half:])]
        if half < blocks
        else []
    )
    _require(not parts or torch.equal(torch.cat(parts, 1), block), name, "the other columns")
    return _bytes(block)


def _one_by_one(x: Tensor, weight: Tensor) -> Tensor:
    """Each column block by a call of its own, on one thread."""
    with _single_thread():
        return torch.cat([torch.mm(x, block) for block in weight], 1)


def _check_products(rows: int, inner: int, columns: int) -> bytes:
    name = f"an attention product of {inner} inputs"
    a, b = rough(5, rows, inner, seed=3), rough(5, columns, inner, seed=4).transpose(1, 2)
    batch = batched_product(a, b)
    with _single_thread():
        alone = torch.stack([torch.mm(a[i], b[i]) for i in range(5)])
    _require(torch.equal(batch, alone), name, "the batch or the number of threads")
    _require(torch.equal(batched_product(a[:1], b[:1]), batch[:1]), name, "the size of the batch")
    shared = torch.bmm(a, b[0].expand(5, -1, -1))
    _require(torch.equal(shared[0], batch[0]), name, "whether tiles share keys")
    rolled = batched_product(a.roll(3, 1), b)
    _require(torch.equal(rolled, batch.roll(3, 1)), name, "the row's place")
    return _bytes(batch)


def _check_exp() -> bytes:
    x = rough(200_003, seed=5).mul_(40.0)
    whole = torch.exp(x)
    with _single_thread():
        _require(torch.equal(torch.exp(x), whole), "exp", "the number of threads")
    for start in (*range(1, 35), 1000, 65_536, 199_990):
        for length in (1, 7, 16, 33, 4096):
            part = torch.exp(x[start : start + length].clone())
            _require(torch.equal(part, whole[start : start + length]), "exp", "the number's place")
    _require(
        torch.exp(torch.tensor([0.0, -torch.inf])).tolist() == [1.0, 0.0],
        "exp",
        "nothing, but exp(0) or exp(-inf) is wrong",
    )
    return _bytes(whole[:4096])


def _require(ok: bool, what: str, cause: str) -> None:
    if not ok:
        raise EngineError(
            f"this machine's arithmetic is not row-invariant: the bits of {what} depend on {cause}. "
            "Exact serving is impossible here; another build of torch may help."
        )


@contextlib.contextmanager
def _single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _bytes(x: Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()
