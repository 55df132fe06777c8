"""A Ray and a Serve of their own, in a process beside the tests', to which Serve config files are deployed as `serve run` does it.

The tests use `ServeDriver`; the same file run as a script is that process. It reads a command a line, and answers with a line of JSON: the path
of a config file deploys it, an empty line asks for the status of every application, and the end of its input stops everything.
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

STOP_S = 60.0
OBJECT_STORE_BYTES = 80 << 20


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on now, all different."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [listener.getsockname()[1] for listener in listeners]


class ServeDriver:
    """Use inside `with`. resources: what this one node declares, where the nodes of a cluster do so together."""

    def __init__(self, resources: Iterable[str], *, num_cpus: int) -> None:
        # Unix sockets live below it, and their paths may not be long.
        self._folder = Path(tempfile.mkdtemp(prefix="espalier-", dir="/tmp"))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        declared = json.dumps(dict.fromkeys(resources, 1))
        # -P: Ray gives its workers the script's folder to import from, and files here are named like packages.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(self._folder), str(num_cpus), declared],
            env=environment | {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def deploy(self, path: Path) -> None:
        """Hand the config file to Serve; returns when its controller has it."""
        self._ask(str(path))

    def status(self) -> dict[str, str]:
        """Status and message of each application."""
        return {name: f"{told['status']} {told['message']}".strip() for name, told in self._ask("").items()}

    def stopped(self) -> bool:
        """Ask it to end and wait: whether it did so by itself and without an error."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(STOP_S) == 0

    def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "Serve's process has ended; what it said is on stderr"
        return json.loads(answer)


def main(folder: str, num_cpus: int, resources: dict[str, float]) -> None:
    import ray
    import yaml
    from ray import serve
    from ray.serve._private.api import serve_start
    from ray.serve.schema import ServeDeploySchema

    answers = os.fdopen(os.dup(1), "w")
    # Whatever Ray has to say goes to stderr.
    os.dup2(2, 1)
    ray.init(
        num_cpus=num_cpus,
        resources=resources,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=folder,
    )
    client = None
    for line in sys.stdin:
        if path := line.strip():
            config = ServeDeploySchema.model_validate(yaml.safe_load(Path(path).read_text()))
            client = client or serve_start(proxy_location=config.proxy_location)
            client.deploy_apps(config)
        told = {name: {"status": a.status, "message": a.message} for name, a in serve.status().applications.items()}
        print(json.dumps(told), file=answers, flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
