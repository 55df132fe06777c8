"""Our chart, the values that tests render it with, and where one rendering differs from another."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.kube.crds import load_custom_kinds
from tests.support.kube.helm import Rendered, load_values, render
from tests.support.kube.release import label

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "helm" / "espalier"
EXAMPLES = sorted(path.name for path in CHART.glob("values-*.yaml"))
EVERYTHING = ROOT / "tests" / "data" / "helm" / "everything.yaml"
MINIMAL = {"models": [{"name": "small", "source": {"hostPath": "/srv/models/small"}}]}
KUBE_VERSIONS = ("1.31", "1.37")
# A server with every operator, and one with none.
API_VERSIONS = {"operators": tuple(sorted({version for version, _ in load_custom_kinds()})), "bare": ()}
Values = dict[str, Any]


def values_of(name: str) -> Values:
    """An example by its file's name, or `everything`, or `minimal`."""
    if name == "minimal":
        return MINIMAL
    return load_values(EVERYTHING if name == "everything" else CHART / name)


def overlaid(base: Values, over: Values) -> Values:
    """As a second `-f` does: maps merge, everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = overlaid(below, value) if isinstance(value, dict) and isinstance(below, dict) else value
    return merged


def rendered(which: str, over: Values | None = None, **options: Any) -> Rendered:
    """One of these with some values changed. options: render's."""
    return render(CHART, overlaid(values_of(which), over or {}), **options)


def is_hook(manifest: dict[str, Any]) -> bool:
    """Made only for an event, as the pod of `helm test`; no part of the release itself."""
    return "helm.sh/hook" in (manifest["metadata"].get("annotations") or {})


def ray_service(found: Rendered) -> dict[str, Any]:
    (manifest,) = found.of_kind("RayService")
    return manifest


def differences(before: Rendered, after: Rendered) -> set[str]:
    """Paths that differ, each beginning with Kind/name; an object that only one has is named alone."""
    first = {label(manifest): manifest for manifest in before.manifests}
    second = {label(manifest): manifest for manifest in after.manifests}
    paths = set(first.keys() ^ second.keys())
    return paths.union(*(_differences(first[name], second[name], name) for name in first.keys() & second.keys()))


def _differences(first: Any, second: Any, path: str) -> Iterator[str]:
    if isinstance(first, dict) and isinstance(second, dict):
        for key in first.keys() | second.keys():
            yield from _differences(first.get(key), second.get(key), f"{path}/{key}")
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from _differences(one, other, f"{path}/{index}")
    elif first != second:
        yield path
