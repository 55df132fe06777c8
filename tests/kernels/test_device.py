"""Device classes: versions and capabilities are read, never trusted; nothing raises where there is no GPU or no Triton."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from espalier.kernels.device import (
    ARITHMETICS,
    DeviceClass,
    _device_class,
    classify,
    device_class,
    gluon_tested,
    interpreting,
    numerics_id,
    parse_version,
)
from espalier.kernels.linear.splits import ARITHMETIC


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("3.6.0", (3, 6)),
        ("3.6.0+git9c28c5a1", (3, 6)),
        ("3.10.1", (3, 10)),
        ("4.0rc1", (4, 0)),
        ("main", None),
        ("", None),
        ("3", None),
    ],
)
def test_versions(text: str, version: tuple[int, int] | None) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("version", "tested"),
    [
        ((3, 5), False),
        ((3, 6), True),
        ((3, 7), False),
        ((3, 10), False),
        ((4, 0), False),
        ((0, 0), False),
        (None, False),
    ],
)
def test_gluon_runs_on_tested_versions_only(version: tuple[int, int] | None, tested: bool) -> None:
    assert gluon_tested(version) is tested


@pytest.mark.parametrize(
    ("capability", "version", "interpreted", "triton", "gluon"),
    [
        ((9, 0), (3, 6), False, True, True),
        ((8, 0), (3, 6), False, True, True),
        ((12, 1), (3, 6), False, True, True),
        ((7, 5), (3, 6), False, False, False),
        ((9, 0), (3, 9), False, True, False),
        ((9, 0), (0, 0), False, True, False),
        ((9, 0), None, False, False, False),
        ((9, 0), (3, 6), True, True, False),
    ],
)
def test_what_a_device_can_run(
    capability: tuple[int, int], version: tuple[int, int] | None, interpreted: bool, triton: bool, gluon: bool
) -> None:
    device = classify(capability, 132, 232448, version, interpreted=interpreted)
    assert (device.triton, device.gluon) == (triton, gluon)


def test_names() -> None:
    assert [DeviceClass(capability=found).name for found in ((8, 6), (9, 0), (12, 1), (0, 0))] == [
        "sm86",
        "sm90",
        "sm121",
        "cpu",
    ]


def test_the_numerics_id_names_every_arithmetic_and_the_class() -> None:
    hopper = DeviceClass(capability=(9, 0), num_sms=132)
    assert ARITHMETIC in ARITHMETICS
    assert numerics_id(hopper) == "+".join(ARITHMETICS) + "/sm90"
    assert numerics_id(hopper, ("a-v1", "b-v2")) == "a-v1+b-v2/sm90"
    # What an H200 and an H100 PCIe differ in does not move bits.
    assert numerics_id(hopper) == numerics_id(DeviceClass(capability=(9, 0), num_sms=114))


def test_a_cpu_is_a_class_of_its_own() -> None:
    found = device_class(torch.device("cpu"))
    assert (found.name, found.num_sms, found.gluon, found.triton) == ("cpu", 0, False, interpreting())


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _device_class.cache_clear()
    yield
    _device_class.cache_clear()


@pytest.mark.usefixtures("no_cuda")
def test_asking_for_an_absent_gpu_is_answered() -> None:
    assert (
        device_class(torch.device("cuda")) == device_class(torch.device("cuda", 3)) == device_class(torch.device("cpu"))
    )


@pytest.mark.gpu
def test_a_gpu_says_what_it_is() -> None:
    found = device_class(torch.device("cuda"))
    assert found == device_class(torch.device("cuda", torch.cuda.current_device()))
    assert found.capability == torch.cuda.get_device_capability()
    assert found.num_sms > 0
    assert found.shared_memory >= 99 << 10
    assert found.triton


BROKEN = """
import sys, types, torch
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "triton":
            raise OSError("libtriton.so: cannot open shared object file")
sys.meta_path.insert(0, Broken())
from espalier.kernels import device
assert device.triton_version() is None
assert not device.device_class(torch.device("cuda")).triton
"""

UNKNOWN = """
import sys, types, torch
sys.modules["triton"] = types.ModuleType("triton")
from espalier.kernels import device
assert device.triton_version() == (0, 0)
assert not device.device_class(torch.device("cuda")).gluon
"""


@pytest.mark.parametrize("program", [BROKEN, UNKNOWN], ids=["broken", "unknown"])
def test_a_triton_that_cannot_be_used_is_an_answer(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True)
