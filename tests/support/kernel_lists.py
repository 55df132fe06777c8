"""Which kernels Triton would compile for sm_90: when a shard is loaded, and as its warm-up lists them. Each for a process of its own; no GPU."""

from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.cache import get_cache_key

from espalier.kernels.ahead import Kernel, compile_all, pretend
from espalier.kernels.device import DeviceClass
from espalier.replicas.config import EngineConfig
from espalier.replicas.gpu.compile_rounds import wanted_kernels
from espalier.replicas.gpu.shard import GpuShard
from espalier.replicas.gpu.warm_up import Rounds, WarmUp
from espalier.replicas.model.checkpoint import Checkpoint

H200 = DeviceClass(capability=(9, 0), num_sms=132, shared_memory=232448, triton=True, gluon=True)


class _Compiled:
    """What is launched in a kernel's place: nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *args: object) -> None: ...

    def run(self, *args: object) -> None: ...


def _record(keys: set[tuple[str, str]]) -> None:
    """From now on Triton's compiler only notes the (name, key in the cache) of what it is asked for."""

    def note(src: Any, target: GPUTarget, options: dict[str, Any]) -> _Compiled:
        backend = make_backend(target)
        variables = triton._C.libtriton.get_cache_invalidating_env_vars()
        keys.add((src.name, get_cache_key(src, backend, backend.parse_options(dict(options)), variables)))
        return _Compiled()

    triton.compiler.compile = note


def compiled_by_shard(config: EngineConfig) -> tuple[Rounds, set[tuple[str, str]]]:
    """The shard's real load, with all its tensors in the CPU's memory. -> (what it began its warm-up with, kernels)."""
    keys: set[tuple[str, str]] = set()
    begun: list[Rounds] = []

    def begin(rounds: Rounds, checkpoint: Checkpoint) -> WarmUp:
        begun.append(rounds)
        return WarmUp(None, None, 0)

    _record(keys)
    pretend(H200)
    WarmUp.begin = begin  # type: ignore[method-assign]
    GpuShard(config, torch.device("cpu"))
    (rounds,) = begun
    return rounds, keys


def compiled_ahead(rounds: Rounds) -> set[tuple[str, str]]:
    """What the warm-up's processes would compile."""
    keys: set[tuple[str, str]] = set()
    _record(keys)
    for kernel in wanted_kernels(rounds):
        kernel.compile(rounds.device)
    return keys


def compile_some(rounds: Rounds, names: set[str], cache: Path) -> tuple[list[str], set[str], set[str]]:
    """Compiles the kernels of these names into a fresh cache, and one that cannot be. -> (failures, folders of kernels in the cache, wanted)."""
    knobs.cache.dir = str(cache)
    kernels = [kernel for kernel in wanted_kernels(rounds) if kernel.name in names]
    broken = Kernel(kernels[0].function, {}, {}, {}, kernels[0].options)
    failures = compile_all([broken, *kernels], H200, 2)
    found = {file.parent.name for file in cache.glob("*/*.cubin")}
    wanted = {Path(kernel.compile(H200).metadata_group[f"{kernel.name}.cubin"]).parent.name for kernel in kernels}
    return failures, found, wanted
