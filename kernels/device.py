"""What a device is: its class, what its Triton can run, and the numerics id of what is computed there. Knows no kernel.

Nothing here raises: a Triton that is missing, broken or of an unknown version, and a machine without CUDA, are answers. Whoever launches a
kernel asks here first and takes a form that this device has.
"""

import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from espalier.kernels.attention import splits as attention_splits
from espalier.kernels.linear import splits as linear_splits

# Gluon's interface moves between releases. Kernels written in it run on the versions that they were tested with, and on no other.
GLUON_TESTED = ((3, 6), (3, 7))  # from the first, up to but without the second
GLUON_CAPABILITY = (8, 0)  # mma.sync m16n8k16 and cp.async

# One name for each family of products with a fixed order of sums. A change that moves a bit changes a name.
ARITHMETICS: tuple[str, ...] = (linear_splits.ARITHMETIC, attention_splits.ARITHMETIC)


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """What dispatch may ask.

    capability: CUDA compute capability, (0, 0) for what is no CUDA device. num_sms: streaming multiprocessors. shared_memory: bytes
    that one program may ask for. triton: plain Triton kernels run there, compiled or interpreted. gluon: Gluon kernels do.
    """

    capability: tuple[int, int] = (0, 0)
    num_sms: int = 0
    shared_memory: int = 0
    triton: bool = False
    gluon: bool = False

    @property
    def name(self) -> str:
        """The class whose members round alike: 'sm90', or 'cpu'. That two of them agree is not claimed without a test."""
        return "sm{}{}".format(*self.capability) if self.capability > (0, 0) else "cpu"


def device_class(device: torch.device) -> DeviceClass:
    """Of any torch device; asked once a device, so it costs nothing on a launch path."""
    index = device.index
    if device.type == "cuda" and index is None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return _device_class(device.type, index)


def numerics_id(device: DeviceClass, arithmetics: Sequence[str] = ARITHMETICS) -> str:
    """Such as 'exl3-k16-s8x512-v1+attention-t128-s256-v1/sm90': where ids are equal, the same inputs give the same bits."""
    return f"{'+'.join(arithmetics)}/{device.name}"


def interpreting() -> bool:
    """Whether Triton runs kernels on the CPU, one operation after the other. It asks the variable when a kernel's module is imported."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


@functools.cache
def triton_version() -> tuple[int, int] | None:
    """(major, minor) of the Triton that can be imported, (0, 0) when it does not say, None when there is none."""
    try:
        import triton
    except Exception:  # a broken installation raises OSError, AttributeError, ...: there is no Triton to use then
        return None
    return parse_version(getattr(triton, "__version__", "")) or (0, 0)


def parse_version(text: str) -> tuple[int, int] | None:
    """'3.6.0+git1' -> (3, 6); None for what does not begin with two numbers."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def gluon_tested(version: tuple[int, int] | None) -> bool:
    """Whether a Triton of this version is one that the Gluon kernels were tested with."""
    return version is not None and GLUON_TESTED[0] <= version < GLUON_TESTED[1]


def classify(
    capability: tuple[int, int],
    num_sms: int,
    shared_memory: int,
    version: tuple[int, int] | None,
    *,
    interpreted: bool,
) -> DeviceClass:
    """A CUDA device with that Triton, as dispatch should see it."""
    return DeviceClass(
        capability=capability,
        num_sms=num_sms,
        shared_memory=shared_memory,
        triton=version is not None and capability >= GLUON_CAPABILITY,
        gluon=gluon_tested(version) and not interpreted and capability >= GLUON_CAPABILITY,
    )


@functools.cache
def _device_class(kind: str, index: int | None) -> DeviceClass:
    # torch names AMD's devices "cuda" too; no kernel here was written for them.
    if kind != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return DeviceClass(triton=interpreting() and triton_version() is not None)
    found = torch.cuda.get_device_properties(index)
    return classify(
        (found.major, found.minor),
        found.multi_processor_count,
        getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block),  # absent in torch's stubs
        triton_version(),
        interpreted=interpreting(),
    )
