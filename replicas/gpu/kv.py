"""DeviceKV: the tensors on a GPU that hold keys and values, and the limits of their size. Knows no sequences and no plan."""

import torch
from torch import Tensor

from espalier.replicas.model.config import ModelConfig

# Kernels count a place, (block * kv_heads + head) * block_size + place in the block, in 32 bits.
MAX_SLOTS = 2**31


class DeviceKV:
    """Keys and values of all layers, zeros at first. One block more than asked for, `zero_block`, stays zero.

    keys, values: one [num_blocks + 1, kv_heads, block_size, head_dim] of `dtype` a layer, so that a head's part of a block is one piece of
    memory. storage: all of them in one allocation, [2, layers, num_blocks + 1, kv_heads, block_size, head_dim].
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert num_blocks <= max_blocks(config, block_size)
        shape = (2, config.num_layers, num_blocks + 1, config.num_kv_heads, block_size, config.head_dim)
        self.storage = torch.zeros(shape, dtype=dtype, device=device)
        self.keys: tuple[Tensor, ...] = self.storage[0].unbind()
        self.values: tuple[Tensor, ...] = self.storage[1].unbind()
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.zero_block = num_blocks


def max_blocks(config: ModelConfig, block_size: int) -> int:
    """As many blocks, beside the zero block, as kernels can count."""
    return (MAX_SLOTS - 1) // (config.num_kv_heads * block_size) - 1
