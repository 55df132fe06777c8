"""`--no-skips`, which the run on a GPU relies on: what is skipped, wherever it is decided, counts as failed."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

def test_passes():
    pass

@pytest.mark.skip(reason="by a mark")
def test_marked():
    pass

def test_inside():
    pytest.skip("in its body")

@pytest.mark.xfail(reason="known")
def test_expected_to_fail():
    assert False
"""


@pytest.mark.parametrize(
    ("options", "code", "last"),
    [([], 0, "1 passed, 3 skipped, 1 xfailed"), (["--no-skips"], 1, "passed 1, failed 3, skipped 0")],
)
def test_a_skipped_test_is_a_failed_one(root: Path, tmp_path: Path, options: list[str], code: int, last: str) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text("import pytest\npytest.skip('whole module', allow_module_level=True)\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    plugins = ["-p", "tests.conftest", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugins, "-q", "--continue-on-collection-errors", *options, tmp_path]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert (run.returncode, last in run.stdout) == (code, True), run.stdout
