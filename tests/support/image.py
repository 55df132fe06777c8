"""Builds deploy/images/Dockerfile with buildah on a Debian made on the spot, and starts what it built as its configuration says: its user, its
entrypoint, nothing in the environment but its own, and a root file system that is read-only but for /tmp, /dev/shm and the home.

Needs root, buildah and mmdebstrap; Debian's packages come as this machine's apt gets them, wheels as its pip does. The base and the wheels, of
CPU builds, are kept in the temporary folder for the next run.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCKERFILE = "deploy/images/Dockerfile"
CONSTRAINT = "constraints/cpu.txt"
TAG = "localhost/espalier:test"
BASE_TAG = "localhost/base:test"
# The interpreter of the Debian that the Dockerfile names.
DEBIAN_PYTHON = {"bookworm": "3.11"}
# Mounts the folders that the image may write, all of them empty, and its model; then becomes the image's process 1.
ENTER = """
set -e
root=$1 models=$2; shift 2
mount --make-rprivate /
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
mount -t tmpfs -o uid=1000,gid=0,mode=0775 home "$root/home/espalier"
mount --bind "$models" "$root/mnt"
exec "$@"
"""


@dataclass(frozen=True, slots=True)
class Image:
    """A built image: its root folder, its OCI configuration, and Docker's health check, which OCI's has not."""

    root: Path
    config: Mapping[str, Any]
    health_check: Sequence[str]

    def command(self, *command: str, models: Path, user: str | None = None) -> list[str]:
        """The line that runs `command` (none: the image's own) behind the entrypoint; `models` lies at /mnt. user: uid:gid instead of its own."""
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        enter = [*unshare, "sh", "-c", ENTER, "sh", str(self.root), str(models)]
        chroot = ["chroot", f"--userspec={user or self.config['User']}", "--groups=", str(self.root)]
        env = ["/usr/bin/env", "-i", "-C", self.config["WorkingDir"], *self.config["Env"]]
        return [*enter, *chroot, *env, *self.config["Entrypoint"], *(command or self.config["Cmd"])]

    def run(self, *command: str, models: Path, user: str | None = None) -> str:
        """What it prints; AssertionError when it fails."""
        return _run(self.command(*command, models=models, user=user))


@contextmanager
def built(root: Path) -> Iterator[Image]:
    """The image of the checkout at `root`, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="espalier-image-", ignore_cleanup_errors=True) as folder:
        store = Path(folder)

        def buildah(*arguments: str) -> str:
            # It needs no container runtime, and takes the machine's network.
            environment = os.environ | {"BUILDAH_ISOLATION": "chroot"}
            where = ["--root", str(store / "root"), "--runroot", str(store / "run")]
            return _run(["buildah", *where, *arguments], cwd=root, env=environment)

        try:
            base = buildah("from", "scratch").strip()
            buildah("add", "-q", base, str(_kept_base(root)), "/")
            buildah("commit", "-q", "--rm", base, BASE_TAG)
            arguments = {"BASE": BASE_TAG, "CONSTRAINT": CONSTRAINT, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels"}
            given = [text for name, value in arguments.items() for text in ("--build-arg", f"{name}={value}")]
            wheels = ["-v", f"{_kept_wheels(root)}:/wheels:ro"]
            buildah(
                "bud", "-q", "--format", "docker", "--pull-never", *given, *wheels, "-t", TAG, "-f", DOCKERFILE, "."
            )
            container = buildah("from", "--pull-never", TAG).strip()
            told = json.loads(buildah("inspect", container))
            health_check = told["Docker"]["config"]["Healthcheck"]["Test"]
            yield Image(Path(buildah("mount", container).strip()), told["OCIv1"]["config"], health_check)
        finally:
            # Whatever is mounted goes with its container.
            buildah("rm", "--all")


def _kept_base(root: Path) -> Path:
    """A tar of the least Debian that the Dockerfile's BASE can stand for."""
    suite = _suite(root)
    mirrors = _run(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Identifier: Packages", f"Codename: {suite}"])

    def make(folder: Path) -> None:
        mmdebstrap = ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase", suite, str(folder / "base.tar")]
        _run([*mmdebstrap, *mirrors.split()[:1]])

    return _kept(f"espalier-test-{suite}", make) / "base.tar"


def _kept_wheels(root: Path) -> Path:
    """A folder with everything that pip installs from in the build."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    wanted = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["tracing"]
    wanted += project["build-system"]["requires"]
    suite = _suite(root)
    key = hashlib.sha256(json.dumps([wanted, (root / CONSTRAINT).read_text(), suite]).encode()).hexdigest()[:12]

    def make(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "download", "-q", "-c", CONSTRAINT, "-d", str(folder)]
        _run([*pip, "--only-binary=:all:", "--python-version", DEBIAN_PYTHON[suite], *wanted], cwd=root)

    return _kept(f"espalier-test-wheels-{key}", make)


def _suite(root: Path) -> str:
    found = re.search(r"^ARG BASE=debian:(\w+)-slim$", (root / DOCKERFILE).read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def _kept(name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` has filled, now or in an earlier run. It appears whole or not at all."""
    kept = Path(tempfile.gettempdir()) / name
    if not kept.exists():
        with tempfile.TemporaryDirectory(prefix=f"{name}-", ignore_cleanup_errors=True) as folder:
            fresh = Path(folder) / "fresh"
            fresh.mkdir()
            make(fresh)
            fresh.rename(kept)
    return kept


def _run(command: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout
