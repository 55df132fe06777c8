"""The committed modules are what the proto says, import from where they live, and run on every protobuf that pyproject allows."""

import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.generate_proto import PB_FOLDER, PROTO_ROOT, fetch_compiler, generate

MODULES = {"inference_pb2.py", "inference_pb2.pyi", "inference_pb2_grpc.py"}
# Beside this interpreter, where a package puts it, or on the path.
BUF = shutil.which("buf", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
# The oldest that pyproject allows.
OLDEST = ("protobuf==6.31.1", "grpcio==1.76.0", "grpcio-health-checking==1.76.0", "grpcio-reflection==1.76.0")
ONE_CALL = """
import asyncio
import google.protobuf
from tests.support.fakes import FakeGateway
from tests.support.grpc_serving import generate, request, serving

async def main():
    async with serving(FakeGateway()) as channel:
        print(google.protobuf.__version__, (await generate(channel, request())).text())

asyncio.run(main())
"""


def pip_or_skip(action: str, failure: subprocess.CalledProcessError) -> None:
    """Skips when pip could not reach an index; any other failure is one."""
    if re.search(
        r"Could not find a version|No matching distribution|connection|resolve", failure.stderr, re.IGNORECASE
    ):
        pytest.skip(f"no package index for {action}: {failure.stderr.strip().splitlines()[-1]}")
    raise failure


def test_committed_modules_are_the_protos(tmp_path: Path) -> None:
    try:
        fetch_compiler(tmp_path / "compiler")
    except subprocess.CalledProcessError as failure:
        pip_or_skip("the pinned compiler", failure)
    generate(tmp_path / "compiler", tmp_path / "pb")
    assert {path.name for path in PB_FOLDER.iterdir() if path.is_file()} == MODULES
    for name in sorted(MODULES):
        assert (PB_FOLDER / name).read_text() == (tmp_path / "pb" / name).read_text(), f"{name}: run `make proto`"


def test_modules_import_each_other_relatively_and_ask_for_protobuf_6() -> None:
    stub = (PB_FOLDER / "inference_pb2_grpc.py").read_text()
    assert "from . import inference_pb2 as" in stub
    assert "from espalier" not in stub
    messages = (PB_FOLDER / "inference_pb2.py").read_text()
    assert "# Protobuf Python Version: 6.31.1" in messages


@pytest.mark.skipif(BUF is None, reason="buf is not installed (package buf-bin)")
@pytest.mark.parametrize("command", [["lint"], ["format", "--diff", "--exit-code"]], ids=lambda command: command[0])
def test_buf_finds_nothing(command: list[str]) -> None:
    check = subprocess.run([BUF, *command], cwd=PROTO_ROOT, capture_output=True, text=True, check=False)
    assert (check.returncode, check.stdout + check.stderr) == (0, "")


@pytest.mark.slow
def test_a_call_on_the_oldest_protobuf(tmp_path: Path, root: Path) -> None:
    """This environment has the newest; here server, client and modules run on the oldest. What else they import comes from here."""
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"
    try:
        subprocess.run(
            [python, "-m", "pip", "install", "-q", *OLDEST, "pydantic"], check=True, capture_output=True, text=True
        )
    except subprocess.CalledProcessError as failure:
        pip_or_skip("protobuf 6", failure)
    paths = os.pathsep.join([str(root), str(root / "src")])
    call = subprocess.run(
        [python, "-W", "error", "-c", ONE_CALL],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert call.stdout.strip() == "6.31.1 Hello, world.", call.stderr
