"""The shape of the checkout that style and packaging rely on."""

import os
import re
import subprocess
from pathlib import Path

import pytest

import espalier
from tests.support.imports import LAYERS, source_files

MAX_LINES = 400
MAX_TEST_LINES = 600


@pytest.mark.parametrize("layer", LAYERS)
def test_each_layer_is_a_link_without_an_init(root: Path, layer: str) -> None:
    link = root / "src" / "espalier" / layer
    assert link.is_symlink()
    assert os.readlink(link) == f"../../{layer}"
    # With one, a checkout on the path would shadow installed packages of these names.
    assert not (root / layer / "__init__.py").exists()


def test_the_package_holds_links_and_nothing_else(root: Path) -> None:
    names = {path.name for path in (root / "src" / "espalier").iterdir()} - {"__pycache__"}
    assert names == {"__init__.py", "py.typed", *LAYERS}


def test_files_hold_one_idea(root: Path) -> None:
    tests = [path.relative_to(root) for path in (root / "tests").rglob("*.py")]
    long = {}
    for path in [*source_files(root), *tests]:
        count = len((root / path).read_text(encoding="utf-8").splitlines())
        if "pb" not in path.parts and count > (MAX_TEST_LINES if path.parts[0] == "tests" else MAX_LINES):
            long[str(path)] = count
    assert long == {}


def test_no_file_is_named_for_nothing(root: Path) -> None:
    assert [
        path for path in source_files(root) if path.name in ("utils.py", "helpers.py", "common.py", "misc.py")
    ] == []


def test_every_module_says_what_it_is_for(root: Path) -> None:
    files = [path for path in source_files(root) if "pb" not in path.parts and path.name != "__init__.py"]
    assert [str(path) for path in files if not (root / path).read_text().startswith(('"""', 'r"""'))] == []


@pytest.mark.parametrize("target", ["install", "serve", "test", "lint", "format", "proto"])
def test_makefile_targets(root: Path, target: str) -> None:
    makefile = (root / "Makefile").read_text()
    assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert re.search(rf"^\.PHONY:.*\b{target}\b", makefile, re.MULTILINE)


def test_ci_runs_what_people_run(root: Path) -> None:
    script = root / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert {"make lint", "make test"} <= set(script.read_text().splitlines())


def test_the_changelog_speaks_of_this_version(root: Path) -> None:
    heading = re.search(r"^## .*$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading is not None
    assert espalier.__version__ in heading[0]


def test_nothing_large_or_generated_is_kept(root: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    files = [root / name for name in listed.stdout.split("\0") if name]
    assert [path.name for path in files if path.is_file() and path.stat().st_size > 2**20] == []
