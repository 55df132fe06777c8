"""Helm 4 through helm-python-sdk: render, lint, package. The one place that calls it, so that it can be replaced.

`Chart.render` takes no Kubernetes or API versions though the call behind it does, hence `_native`.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.tools import require_module

# Severities of lint: 1 info, 2 warning, 3 error.
WARNING = 2


class RenderRefusedError(Exception):
    """The chart, its schema or a template said no; the message is theirs."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """manifests: every object, in order of the templates' names. notes: NOTES.txt. text: all YAML together."""

    manifests: list[dict[str, Any]]
    notes: str
    text: str

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]


def render(
    chart: Path,
    values: dict[str, Any] | None = None,
    *,
    kube_version: str = "1.31",
    api_versions: Iterable[str] = (),
    name: str = "rel",
    namespace: str = "llm",
) -> Rendered:
    """What `helm template` prints, schema enforced. kube_version: minor, as in 1.31. Raises RenderRefusedError."""
    helm = require_module("helm_python")
    options = {
        "name": name,
        "namespace": namespace,
        "kube_version": f"v{kube_version}.0",
        "api_versions": list(api_versions),
    }
    try:
        with helm.Chart.load(chart) as loaded:
            arguments = (json.dumps(values) if values is not None else None, json.dumps(options))
            files: dict[str, str] = json.loads(helm._native.call_string("helm_render", loaded._raw(), *arguments))
    except helm.HelmError as error:
        raise RenderRefusedError(str(error)) from None
    notes = "".join(text for path, text in files.items() if path.endswith("NOTES.txt"))
    texts = [text for path, text in sorted(files.items()) if not path.endswith("NOTES.txt")]
    return Rendered([manifest for text in texts for manifest in parse(text)], notes, "\n---\n".join(texts))


def parse(text: str) -> list[dict[str, Any]]:
    """The objects of a stream of YAML documents."""
    return [manifest for manifest in yaml.load_all(text, Loader=yaml.CSafeLoader) if manifest]


def lint(chart: Path, values: dict[str, Any] | None = None, *, kube_version: str = "1.31") -> list[str]:
    """Warnings and errors of `helm lint --strict`."""
    helm = require_module("helm_python")
    report = helm.lint(chart, values, strict=True, kube_version=f"v{kube_version}.0")
    found = [f"{entry['path']}: {entry['error']}" for entry in report["messages"] if entry["severity"] >= WARNING]
    return found or list(report["errors"])


def package(chart: Path, destination: Path) -> Path:
    """The chart as a .tgz in the folder."""
    return Path(require_module("helm_python").package(chart, destination=destination))


def load_values(path: Path) -> dict[str, Any]:
    """A values file, parsed as Helm does."""
    values: dict[str, Any] = require_module("helm_python").values_from_yaml(path.read_text(encoding="utf-8"))
    return values
