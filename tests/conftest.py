"""What every test gets: fixed seeds, one torch thread, no network, no ESPALIER_* variable of the caller. Knows no part of espalier.

`--no-skips` is for the run on a GPU: there nothing may be missing, so a skipped test is a failed one.
"""

import os
import random
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test is a failed test; print all counts")


def pytest_configure(config: pytest.Config) -> None:
    """Warnings are errors, but for those that Ray's own modules raise while they are imported."""
    config.addinivalue_line("filterwarnings", "ignore:Using extra keyword arguments on .Field.:DeprecationWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped without CUDA; tests that are neither slow nor start a cluster get a short time limit."""
    no_gpu = None if torch.cuda.is_available() else pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if no_gpu is not None and item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)
        if not any(item.get_closest_marker(name) for name in ("slow", "sweep", "cluster", "timeout")):
            item.add_marker(pytest.mark.timeout(QUICK_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return _not_skipped(report) if item.config.option.no_skips else report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return _not_skipped(report) if collector.config.option.no_skips else report


Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def _not_skipped(report: Report) -> Report:
    # An expected failure is reported as skipped too; it says so in `wasxfail`.
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and nothing may be: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With --no-skips, all three counts, also those that are zero."""
    if config.option.no_skips:
        counts = {name: len(terminalreporter.getreports(name)) for name in ("passed", "failed", "error", "skipped")}
        counts["failed"] += counts.pop("error")
        terminalreporter.write_line(", ".join(f"{name} {count}" for name, count in counts.items()))


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
