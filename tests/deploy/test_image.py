"""The image: its file is clean, it says the versions that the chart says, and what it builds starts as a cluster would start it."""

import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
import yaml
from packaging.requirements import Requirement

import espalier
from tests.support.image import DOCKERFILE, Image, built
from tests.support.tiny import make_tiny_checkpoint
from tests.support.tools import require_tool

ENTRYPOINT = "deploy/images/entrypoint.sh"
# Of an extension's and a launcher's kind: Python.h of the venv's interpreter, and a link against a library.
COMPILE = """
import ctypes, pathlib, subprocess, sysconfig
pathlib.Path("/tmp/launcher.c").write_text("#include <Python.h>\\n#include <dlfcn.h>\\nint answer(void) { return dlopen(0, RTLD_NOW) ? 42 : 0; }\\n")
include = sysconfig.get_paths()["include"]
subprocess.run(["gcc", "-shared", "-fPIC", "-O3", f"-I{include}", "/tmp/launcher.c", "-o", "/tmp/launcher.so", "-ldl"], check=True)
print(ctypes.CDLL("/tmp/launcher.so").answer())
"""
STOP_TIMEOUT_S = 60


def beside_python(name: str) -> str:
    program = str(Path(sys.executable).with_name(name))
    require_tool(program)
    return program


@pytest.fixture(scope="module")
def chart(root: Path) -> Path:
    return root / "helm" / "espalier"


@pytest.mark.deploy
def test_files_are_clean(root: Path) -> None:
    for command in ([beside_python("hadolint"), DOCKERFILE], [beside_python("shellcheck"), ENTRYPOINT]):
        done = subprocess.run(command, cwd=root, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "")


def test_versions_are_one(root: Path, chart: Path) -> None:
    dockerfile = (root / DOCKERFILE).read_text()
    assert re.findall(r"^ARG VERSION=(.*)$", dockerfile, re.MULTILINE) == [espalier.__version__]
    app_version = yaml.safe_load((chart / "Chart.yaml").read_text())["appVersion"]
    assert app_version == espalier.__version__
    asked = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    (ray,) = [one for one in map(Requirement, asked) if one.name == "ray"]
    ray_version = yaml.safe_load((chart / "values.yaml").read_text())["rayVersion"]
    assert ray.specifier.contains(ray_version)
    assert version("ray") == ray_version


def test_the_entrypoint_finds_the_driver_and_becomes_the_command(root: Path, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").touch()
    environment = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}
    command = [str(root / ENTRYPOINT), "sh", "-c", 'echo "$1"; exit 3', "sh", "two words"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "two words\n")
    assert done.stderr == f"espalier: libcuda.so.1 {tmp_path}/libcuda.so.1\n"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_tiny_checkpoint(folder / "tiny")
    # The image's user is not the one who wrote it.
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@pytest.fixture(scope="module")
def image(root: Path) -> Iterator[Image]:
    require_tool("buildah", "mmdebstrap", "unshare")
    with built(root) as image:
        yield image


@pytest.mark.deploy
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_it_has_what_a_cluster_needs(image: Image, models: Path, chart: Path) -> None:
    assert image.config["User"] == "1000:0"
    assert image.config["StopSignal"] == "SIGTERM"
    assert image.config["Labels"]["org.opencontainers.image.version"] == espalier.__version__
    assert image.health_check[:2] == ["CMD", "wget"]
    # KubeRay starts Ray by one shell or the other, and its probes call wget.
    for shell in ("-c", "-lc"):
        found = image.run("bash", shell, "command -v ray espalier wget && id -u && id -g", models=models).split()
        assert [Path(path).name for path in found] == ["ray", "espalier", "wget", "1000", "0"]
    values = yaml.safe_load((chart / "values.yaml").read_text())
    assert values["rayVersion"] in image.run("ray", "--version", models=models)
    assert f"ray=={values['rayVersion']}" in image.run("cat", "/opt/espalier/packages.txt", models=models).split()
    assert image.run("python3", "-c", COMPILE, models=models) == "42\n"
    # A uid drawn by the cluster has group 0 and nothing else.
    assert image.run("bash", "-c", "touch ~/mine && id -u", models=models, user="123456:0") == "123456\n"


@pytest.mark.deploy
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_serves_from_a_read_only_root_and_stops(image: Image, models: Path, tmp_path: Path) -> None:
    ports = ["--http-port", "0", "--grpc-port", "0"]
    options = ["--model", "/mnt/tiny", "--replicas", "1", "--drain-timeout", "1", *ports]
    log = tmp_path / "log"
    with log.open("w") as output:
        command = image.command("espalier", "serve", *options, models=models)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True)
    try:
        assert process.stdout is not None
        words: list[str] = []
        for line in process.stdout:
            words += line.split()
            if "try:" in words:
                break
        assert "try:" in words, log.read_text()
        url = words[words.index("HTTP") + 1]
        body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
        assert reply["usage"]["completion_tokens"] == 8
        assert "espalier: libcuda.so.1 " in log.read_text()
        # Its process 1, as a container's runtime sees it.
        (init,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        status = Path(f"/proc/{init}/status").read_text()
        assert re.search(r"^Name:\ttini$", status, re.MULTILINE)
        assert re.search(r"^Uid:\t1000\t", status, re.MULTILINE)
        subprocess.run(["kill", f"-{signal.SIGTERM.value}", init], check=True)
        assert process.wait(timeout=STOP_TIMEOUT_S) == 0, log.read_text()
    finally:
        process.kill()
        process.communicate()
    assert "Read-only file system" not in log.read_text()
