"""What every test gets: fixed seeds, one torch thread, no network, no ESPALIER_* variable of the caller. Knows no part of espalier."""

import os
import random
import sys
from pathlib import Path

# Before torch and huggingface_hub are imported: both read these once. Child processes inherit them.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
# Behind everything installed: `from tests.support...` works, and no folder of the checkout shadows a package.
sys.path.append(str(ROOT))

QUICK_TIMEOUT_S = 120
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors, but for those that Ray's own modules raise while they are imported."""
    config.addinivalue_line("filterwarnings", "ignore:Using extra keyword arguments on .Field.:DeprecationWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped without CUDA; tests that are neither slow nor start a cluster get a short time limit."""
    no_gpu = None if torch.cuda.is_available() else pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if no_gpu is not None and item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)
        if not any(item.get_closest_marker(name) for name in ("slow", "cluster", "timeout")):
            item.add_marker(pytest.mark.timeout(QUICK_TIMEOUT_S))


@pytest.fixture(autouse=True)
def _same_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ESPALIER_")]:
        monkeypatch.delenv(name)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """Golden models and vectors that lie beside the checkout; tests that need them are skipped where there are none."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared")
    return SHARED
