"""`python -m espalier.replicas.gpu.compile_rounds`: compiles the kernels of a model's rounds into Triton's cache, on many cores and no GPU.

It walks through all rounds as a shard does, with tensors that have no memory, and compiles what they would launch (`kernels/ahead.py`).
Input: a pickled (`Rounds`, number of processes). Output: a `Report` in JSON. Knows no weights.
"""

import dataclasses
import functools
import json
import pickle
import sys
from collections.abc import Hashable

import torch
from torch import Tensor

from espalier.kernels.ahead import Kernel, compile_all, list_kernels
from espalier.replicas.gpu.kv import DeviceKV
from espalier.replicas.gpu.load import load_network
from espalier.replicas.gpu.network import GpuNetwork
from espalier.replicas.gpu.round import Model
from espalier.replicas.gpu.state import SlotState, sampling_limits
from espalier.replicas.gpu.track import Track
from espalier.replicas.gpu.warm_up import Report, Rounds
from espalier.replicas.model.checkpoint import open_checkpoint

META = torch.device("meta")
# Begun first, so that none of them is alone at the end: kernels that take seconds, the slowest first.
_SLOW = (
    "choose_kernel",
    "prompt_wgmma",
    "prompt_decoded",
    "report_kernel",
    "attend_chunk",
    "guess_kernel",
    "merge_row",
)


def wanted_kernels(rounds: Rounds) -> list[Kernel]:
    """Every kernel that preparing these rounds launches, in the order in which to compile them. Leaves the process as `list_kernels` does."""
    order = {name: place for place, name in enumerate(_SLOW)}
    kernels = list_kernels(rounds.device, functools.partial(_prepare, rounds))
    return sorted(kernels, key=lambda kernel: order.get(kernel.name, len(order)))


def _prepare(rounds: Rounds) -> None:
    """What a shard does before it serves, on tensors without memory."""
    checkpoint = open_checkpoint(rounds.model_path)
    network = distinct_layers(load_network(checkpoint, META, rounds.max_context))
    config = network.config
    limits = sampling_limits(config.vocab_size, len(config.eos_token_ids))
    state = SlotState(rounds.max_lanes, -(-rounds.max_context // rounds.block_size), limits, META)
    kv = DeviceKV(config, 1, rounds.block_size, rounds.kv_dtype, META)  # no kernel depends on the number of blocks
    for shapes in rounds.shapes:
        Track(Model(network, kv, state), shapes, rounds.block_size, META, None).prepare(graphs=False)


def distinct_layers(network: GpuNetwork) -> GpuNetwork:
    """The first layer, which finds nothing to add to the stream, and one of each kind behind it: others like it launch the same kernels."""
    first, *others = network.layers
    kinds = {_kind(layer): layer for layer in others}
    return dataclasses.replace(network, layers=(first, *kinds.values()))


def _kind(part: object) -> Hashable:
    """Equal for parts of a network whose launches differ in addresses alone."""
    if isinstance(part, Tensor):
        return part.dtype, tuple(part.shape), part.stride()
    if isinstance(part, tuple):
        return tuple(_kind(item) for item in part)
    if dataclasses.is_dataclass(part):
        return tuple(_kind(getattr(part, field.name)) for field in dataclasses.fields(part))
    assert isinstance(part, Hashable)
    return part


def _main() -> None:
    rounds, num_processes = pickle.load(sys.stdin.buffer)
    kernels = wanted_kernels(rounds)
    failures = compile_all(kernels, rounds.device, num_processes)
    print(json.dumps(dataclasses.asdict(Report(len(kernels) - len(failures), failures))))


if __name__ == "__main__":
    _main()
