"""Matrix products on a CPU whose bits belong to a row and a column alone: fixed blocks of 8 rows and of 128 columns.

A BLAS library picks its kernel, and may cut the sum over inputs between threads, by the shape of the call. So every call here is a batch
of products [8, in] x [in, 128], whatever the number of rows or columns present: the library sees one shape a layer, and a linear computed
whole equals the same in parts of its columns. Two facts about the library are relied on and checked on the machine at load
(`replicas/model/invariance.py`): a row's bits do not depend on its place in the block of 8, and in a batch of two or more products each
has the bits of a call of its own on one thread. Knows no checkpoint and no quantization.
"""

import torch
from torch import Tensor

ROW_BLOCK = 8
COLUMN_BLOCK = 128


def padded_rows(num_rows: int) -> int:
    """The next multiple of ROW_BLOCK."""
    return -(-num_rows // ROW_BLOCK) * ROW_BLOCK


def num_column_blocks(out_features: int) -> int:
    """Column blocks of a linear; the last one may be partly padding."""
    return -(-out_features // COLUMN_BLOCK)


def pack_columns(weight: Tensor, out: Tensor | None = None) -> Tensor:
    """[in, out] of any float dtype -> fp32 [ceil(out/128), in, 128] contiguous; missing columns of the last block are zero.

    out: where to write it, fp32 of that shape.
    """
    in_features, out_features = weight.shape
    blocks = num_column_blocks(out_features)
    if out is None:
        out = torch.empty((blocks, in_features, COLUMN_BLOCK), dtype=torch.float32)
    for block in range(blocks):
        part = weight[:, block * COLUMN_BLOCK : (block + 1) * COLUMN_BLOCK]
        out[block, :, : part.shape[1]] = part
        out[block, :, part.shape[1] :] = 0.0
    return out


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """[n, p, q] x [n, q, r] -> fp32 [n, p, r] contiguous, each product with the bits of a call of its own.

    A batch of one is computed twice: the library would give all its threads to it and cut the sum between them.
    """
    if a.shape[0] == 1:
        return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    return torch.bmm(a, b)


def blocked_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x fp32 [rows, in], rows a multiple of 8, times a packed weight [blocks, in, 128] -> fp32 [rows, blocks * 128]."""
    rows, in_features = x.shape
    blocks = weight.shape[0]
    assert rows % ROW_BLOCK == 0 and weight.shape[1] == in_features, (x.shape, weight.shape)
    if rows == ROW_BLOCK:
        y = batched_product(x.expand(blocks, ROW_BLOCK, in_features), weight)
    else:
        # One column block at a time: it stays in the core's cache for all the rows.
        y = x.new_empty((blocks, rows, COLUMN_BLOCK))
        row_blocks = x.reshape(-1, ROW_BLOCK, in_features)
        for block in range(blocks):
            columns = weight[block].expand(len(row_blocks), in_features, COLUMN_BLOCK)
            torch.bmm(row_blocks, columns, out=y[block].view(-1, ROW_BLOCK, COLUMN_BLOCK))
    return y.transpose(0, 1).reshape(rows, blocks * COLUMN_BLOCK)
