"""What gets installed: one version, one command, and a wheel with real files where the checkout has links."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import espalier
from tests.support.imports import LAYERS, source_files


def test_one_version(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "espalier.__version__"}
    assert version("espalier") == espalier.__version__


def test_the_command_is_installed() -> None:
    (command,) = entry_points(group="console_scripts", name="espalier")
    assert command.value == "espalier.deploy.cli:main"


@pytest.mark.parametrize("arguments", [["--version"], ["serve", "--help"], ["bench", "--help"]])
def test_the_module_answers_like_the_command(arguments: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "espalier.deploy", *arguments], capture_output=True, text=True, check=True
    )
    assert "espalier" in run.stdout
    assert run.stderr == ""


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_only_ours(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="building without isolation needs setuptools here")
    # Built from a copy: setuptools leaves build folders behind, and reads files it left in earlier runs.
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("src", *LAYERS):
        shutil.copytree(
            root / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, copy / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-q",
        "-w",
        tmp_path,
        copy,
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("espalier-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licence = [name for name in archive.namelist() if name.endswith("LICENSE")]
    assert licence
    assert {name.split("/")[0] for name in names} == {"espalier"}
    assert {f"espalier/{path.as_posix()}" for path in source_files(root)} <= names
    assert "espalier/py.typed" in names
    protos = {f"espalier/{path.relative_to(root).as_posix()}" for path in (root / "cluster").rglob("*.proto")}
    assert protos
    assert protos <= names
    # Files of images and of the local stack are the checkout's.
    assert [name for name in names if re.match(r"espalier/deploy/(compose|images)", name)] == []
