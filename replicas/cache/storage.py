"""KVCache: the tensors that hold keys and values, and how many blocks of them a machine gets. Knows no sequences."""

import math
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from espalier.kernels.attention.reference import Workspace
from espalier.replicas.config import KVDtype, ResolvedConfig
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.model.config import ModelConfig

_DTYPES: dict[KVDtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Without kv_tokens: at most so many, and at most this share of the machine's memory.
_DEFAULT_TOKENS = 65_536
_DEFAULT_MEMORY_SHARE = 0.25


class KVCache:
    """Keys and values of all layers, zeros at first. One block more than asked for, `zero_block`, stays zero.

    keys, values: one [num_blocks + 1, kv_heads, block_size, head_dim] a layer, so that a head's part of a block is one piece of memory.
    storage: all of them, [2, layers, num_blocks + 1, kv_heads, block_size, head_dim].
    workspace: where attention gathers them; one round at a time.
    """

    def __init__(self, config: ModelConfig, num_blocks: int, block_size: int, dtype: KVDtype) -> None:
        shape = (2, config.num_layers, num_blocks + 1, config.num_kv_heads, block_size, config.head_dim)
        self.storage = _lazy_zeros(shape, _DTYPES[dtype])
        self.keys: tuple[Tensor, ...] = self.storage[0].unbind()
        self.values: tuple[Tensor, ...] = self.storage[1].unbind()
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.zero_block = num_blocks
        self.workspace = Workspace()

    def store(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes rows 0, 1, ... of k and v, fp32 [rows, kv_heads, head_dim], to their slots, rounded to the cache's dtype.

        slots: int64 [written rows, kv_heads], (block * kv_heads + head) * block_size + place in the block. Further rows are padding.
        """
        num_rows = slots.shape[0]
        for cached, rows in ((self.keys[layer], k), (self.values[layer], v)):
            flat = cached.view(-1, cached.shape[-1])
            flat.index_copy_(0, slots.view(-1), rows[:num_rows].reshape(-1, flat.shape[1]).to(cached.dtype))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory when first written; torch.zeros would take it all at once."""
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def plan_memory(config: ResolvedConfig, model: ModelConfig, memory_bytes: int) -> tuple[int, int]:
    """(blocks, longest context in tokens) for this configuration on a machine of so much memory.

    Raises InvalidRequestError naming the option when the options cannot be met together.
    """
    if config.max_context is not None and config.max_context > model.max_positions:
        message = f"max_context: {config.max_context} is beyond the model's {model.max_positions} positions"
        raise InvalidRequestError(message, param="max_context")
    wanted_context = config.max_context or model.max_positions
    token_bytes = kv_bytes_per_token(model, config.kv_dtype)
    if config.kv_tokens is not None:
        num_blocks = config.kv_tokens // config.block_size
        if num_blocks * config.block_size * token_bytes > memory_bytes:
            message = f"kv_tokens: {config.kv_tokens} tokens of {token_bytes} bytes do not fit in {memory_bytes} bytes of memory"
            raise InvalidRequestError(message, param="kv_tokens")
    else:
        tokens = min(config.max_lanes * wanted_context, _DEFAULT_TOKENS)
        tokens = min(tokens, int(memory_bytes * _DEFAULT_MEMORY_SHARE) // token_bytes)
        num_blocks = max(1, -(-tokens // config.block_size))
    capacity = num_blocks * config.block_size
    if config.max_context is not None and config.max_context > capacity:
        message = f"max_context: {config.max_context} tokens do not fit in a cache of {capacity}; raise kv_tokens"
        raise InvalidRequestError(message, param="max_context")
    return num_blocks, min(wanted_context, capacity)


def kv_bytes_per_token(model: ModelConfig, dtype: KVDtype) -> int:
    """Bytes of one token's keys and values in all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * _DTYPES[dtype].itemsize


def machine_memory_bytes() -> int:
    """Memory of this machine, or of this container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit_file = Path("/sys/fs/cgroup/memory.max")
    try:
        limit = limit_file.read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total
