"""What of a GPU's memory goes where, decided from headers before any weight is read, or a refusal with the numbers. Allocates nothing."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor

from espalier.replicas.cache.storage import kv_bytes_per_token
from espalier.replicas.config import EngineConfig, resolved
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.gpu.kv import max_blocks
from espalier.replicas.gpu.load import load_network
from espalier.replicas.gpu.network import GpuNetwork
from espalier.replicas.model.checkpoint import Checkpoint
from espalier.replicas.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Bytes of each part, and what they hold.

    weights_bytes: packed linears, embedding, norms, rotary tables for max_context positions. kv_bytes: num_blocks blocks and the zero block.
    max_context: tokens of one sequence at most, which all blocks together can hold.
    """

    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    graphs_bytes: int
    num_blocks: int
    max_context: int

    @property
    def num_bytes(self) -> int:
        """All parts together."""
        return self.weights_bytes + self.kv_bytes + self.workspace_bytes + self.graphs_bytes


def plan_device_memory(
    config: EngineConfig,
    checkpoint: Checkpoint,
    *,
    total_bytes: int,
    free_bytes: int,
    workspace_bytes: int,
    graphs_bytes: int,
) -> DevicePlan:
    """The plan for a device of `total_bytes`, of which `free_bytes` are free now.

    All parts fit in memory_share of the device and in what is free. Without kv_tokens there are blocks for max_lanes sequences of the
    longest context, or as many as fit; without max_context it is the model's own, or shorter, what all blocks hold.
    Raises InvalidRequestError naming the option, with GiB of each part and of the device, when less than one sequence fits.
    """
    options, model = resolved(config), checkpoint.config
    if config.max_context is not None and config.max_context > model.max_positions:
        raise _refusal("max_context", f"{config.max_context} is beyond the model's {model.max_positions} positions")
    size = options.block_size
    context = config.max_context or model.max_positions
    weights_bytes = network_bytes(load_network(checkpoint, torch.device("meta"), max_context=0))
    block_bytes = size * kv_bytes_per_token(model, options.kv_dtype)
    most = max_blocks(model, size)

    def plan(num_blocks: int, max_context: int) -> DevicePlan:
        rope_bytes = max_context * _rope_bytes_per_token(model)
        kv_bytes = (num_blocks + 1) * block_bytes
        return DevicePlan(weights_bytes + rope_bytes, kv_bytes, workspace_bytes, graphs_bytes, num_blocks, max_context)

    def refuse(option: str, wanted: DevicePlan, reason: str) -> InvalidRequestError:
        return _refusal(option, f"{reason}: {_numbers(wanted, total_bytes, free_bytes, options.memory_share)}")

    budget = min(int(total_bytes * options.memory_share), free_bytes)
    if config.kv_tokens is not None:
        num_blocks = config.kv_tokens // size
        if num_blocks > most:
            raise _refusal(
                "kv_tokens", f"{config.kv_tokens} is more than the {most * size} tokens that kernels can count"
            )
        if config.max_context is not None and config.max_context > num_blocks * size:
            message = f"{context} tokens do not fit in a cache of {num_blocks * size}; raise kv_tokens"
            raise _refusal("max_context", message)
        asked = plan(num_blocks, min(context, num_blocks * size))
        if asked.num_bytes > budget:
            raise refuse("kv_tokens", asked, f"{config.kv_tokens} tokens do not fit")
        return asked
    sequence_blocks = -(-context // size)
    num_blocks = min(
        (budget - plan(-1, context).num_bytes) // block_bytes - 1, options.max_lanes * sequence_blocks, most
    )
    if num_blocks >= sequence_blocks:
        return plan(num_blocks, context)
    if config.max_context is not None:
        raise refuse("max_context", plan(sequence_blocks, context), f"one sequence of {context} tokens does not fit")
    # Shorter sequences, whose rotary tables are shorter too.
    with_tables = block_bytes + size * _rope_bytes_per_token(model)
    num_blocks = min((budget - plan(0, 0).num_bytes) // with_tables, sequence_blocks, most)
    if num_blocks < 1:
        smallest = plan(1, size)
        option = "memory_share" if smallest.num_bytes <= free_bytes else "model_path"
        raise refuse(option, smallest, f"one sequence of {size} tokens does not fit")
    return plan(num_blocks, min(context, num_blocks * size))


def network_bytes(network: GpuNetwork) -> int:
    """Bytes of all tensors of a network, memory that several share counted once. On "meta", what they would take."""
    storages = [tensor.untyped_storage() for tensor in _tensors(network)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _tensors(part: object) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from _tensors(item)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _tensors(getattr(part, field.name))


def _rope_bytes_per_token(model: ModelConfig) -> int:
    """fp32 cos and sin, half a head wide each."""
    return 2 * (model.head_dim // 2) * torch.float32.itemsize


def _refusal(option: str, message: str) -> InvalidRequestError:
    return InvalidRequestError(f"{option}: {message}", param=option)


def _numbers(wanted: DevicePlan, total_bytes: int, free_bytes: int, share: float) -> str:
    return (
        f"weights {_gib(wanted.weights_bytes)} + KV blocks {_gib(wanted.kv_bytes)} + workspace {_gib(wanted.workspace_bytes)} "
        f"+ graphs {_gib(wanted.graphs_bytes)} = {_gib(wanted.num_bytes)} GiB; the device has {_gib(total_bytes)} GiB, "
        f"{_gib(free_bytes)} free, and memory_share {share:g} allows {_gib(int(total_bytes * share))}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"
