"""Compiling ahead of the first launch, where there is no GPU: which kernels some work would launch on a device, and into Triton's cache with them.

For processes that do nothing else: in one that listed kernels, every device is taken for the one described, and no kernel runs. Knows no kernel.
"""

import contextlib
import ctypes
import fcntl
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
from triton.runtime import driver

from espalier.kernels import device as devices
from espalier.kernels.device import DeviceClass


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compilation, as Triton wants it. function: of Triton or Gluon."""

    function: Any
    signature: Mapping[str, Any]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The function's."""
        return str(self.function.__name__)

    def compile(self, device: DeviceClass) -> Any:
        """Into the cache, or from there: Triton's CompiledKernel."""
        source = self.function.ASTSource(self.function, self.signature, self.constants, self.attributes)
        return self.function.compile(source, target=_target(device), options=dict(self.options))


def cache_folder() -> Path:
    """Where Triton keeps what it compiled."""
    return Path(knobs.cache.dir)


def compiler() -> str:
    """Names the compiler."""
    return f"triton {triton.__version__}"


def list_kernels(device: DeviceClass, work: Callable[[], object]) -> list[Kernel]:
    """Each kernel once that `work` launches, in its order. It runs on tensors of torch's device "meta", and finds nothing in them."""
    found: dict[tuple[Any, str], Kernel] = {}

    def keep(*, key: str, fn: Any, compile: Mapping[str, Any], **_: object) -> bool:
        options = json.loads(compile["specialization_data"])["options"]
        found[fn.jit_function, key] = Kernel(
            fn.jit_function,
            compile["signature"],
            compile["constants"],
            compile["configs"][0],
            {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()},
        )
        return True  # Triton neither compiles nor launches

    pretend(device)
    knobs.runtime.jit_cache_hook = keep
    with _Addresses():
        work()
    knobs.runtime.jit_cache_hook = None
    return list(found.values())


def compile_all(kernels: Sequence[Kernel], device: DeviceClass, num_processes: int) -> list[str]:
    """Compiles them, in this order, in that many forks of this process, which share its memory. -> what went wrong with which.

    One call at a time and cache: what those of a machine's other replicas compile meanwhile is found in the cache then.
    """
    work = _Work(kernels, device, launchers=_has_cuda_library())
    processes = min(num_processes, len(kernels))
    failures = []
    with _alone(), ProcessPoolExecutor(processes, get_context("fork"), _inherit, (work,)) as pool:
        if work.launchers:
            pool.submit(_build_utilities)
        jobs = [pool.submit(_compile, place) for place in range(len(kernels))]
        for kernel, job in zip(kernels, jobs, strict=True):
            if (error := job.exception()) is not None:
                failures.append(f"{kernel.name}: {type(error).__name__}: {error}".split("\n")[0])
    return failures


def pretend(device: DeviceClass) -> None:
    """From here on this process takes every device for `device`; it must launch nothing."""
    devices._device_class = lambda kind, index: device  # type: ignore[assignment]
    driver.set_active(_Described(_target(device)))


class _Described:
    """A driver without a device: it says what there would be."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Addresses(TorchFunctionMode):
    """Tensors without memory have addresses, different ones and aligned as an allocator's: launchers and Triton ask for them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.data_ptr:  # that of "meta" counts from the beginning of the tensor's memory
            return args[0].untyped_storage()._cdata * 256 + result
        return result


@dataclass(frozen=True, slots=True)
class _Work:
    """What forks have in common. launchers: also the C code that Triton launches a kernel with, which needs CUDA's library."""

    kernels: Sequence[Kernel]
    device: DeviceClass
    launchers: bool


_work = _Work((), DeviceClass(), launchers=False)  # of this process, where it is a fork


def _inherit(work: _Work) -> None:
    global _work
    _work = work


def _compile(place: int) -> None:
    kernel = _work.kernels[place].compile(_work.device)
    if _work.launchers:
        CudaLauncher(kernel.src, kernel.metadata)


def _build_utilities() -> None:
    CudaUtils()  # C code too: CUDA's functions that Triton itself calls


def _has_cuda_library() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _target(device: DeviceClass) -> GPUTarget:
    major, minor = device.capability
    return GPUTarget("cuda", 10 * major + minor, 32)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "espalier.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
