"""What an API server says of itself: its version, the kinds it has, and an OpenAPI document from which clients learn that it checks fields."""

from dataclasses import dataclass
from typing import Any

from tests.support.kube.crds import load_custom_kinds

# A kind with ! has no namespace.
BUILT_IN = {
    "v1": "ConfigMap Secret Service ServiceAccount Pod PersistentVolumeClaim Namespace!",
    "apps/v1": "Deployment StatefulSet DaemonSet",
    "batch/v1": "Job CronJob",
    "policy/v1": "PodDisruptionBudget",
    "networking.k8s.io/v1": "Ingress NetworkPolicy",
    "rbac.authorization.k8s.io/v1": "Role RoleBinding ClusterRole! ClusterRoleBinding!",
    "autoscaling/v2": "HorizontalPodAutoscaler",
}
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
PARAMETERS = [
    {"name": name, "in": "query", "schema": {"type": "string"}}
    for name in ("dryRun", "fieldValidation", "fieldManager", "force")
]


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind as URLs name it. api_version: v1 or group/version."""

    api_version: str
    kind: str
    plural: str
    namespaced: bool

    @property
    def group_version_kind(self) -> dict[str, str]:
        group, _, version = self.api_version.rpartition("/")
        return {"group": group, "version": version, "kind": self.kind}


def all_resources() -> dict[tuple[str, str], Resource]:
    """(apiVersion, plural) -> resource: the built-in kinds above and those of tests/data/crds."""
    found = [
        Resource(api_version, kind.rstrip("!"), _plural(kind.rstrip("!")), not kind.endswith("!"))
        for api_version, kinds in BUILT_IN.items()
        for kind in kinds.split()
    ]
    found += [
        Resource(kind.api_version, kind.kind, kind.plural, kind.namespaced) for kind in load_custom_kinds().values()
    ]
    return {(resource.api_version, resource.plural): resource for resource in found}


def _plural(kind: str) -> str:
    word = kind.lower()
    if word.endswith("y"):
        return f"{word[:-1]}ies"
    return f"{word}es" if word.endswith("s") else f"{word}s"


def describe(parts: list[str], resources: list[Resource], kube_version: str) -> dict[str, Any] | None:
    """The answer to a path that asks about the server, split at its slashes; None for any other path."""
    match parts:
        case ["version"]:
            major, minor = kube_version.split(".")
            return {"major": major, "minor": minor, "gitVersion": f"v{kube_version}.0", "platform": "stand-in"}
        case ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        case ["apis"]:
            return _groups(resources)
        case ["api", "v1"]:
            return _kinds("v1", resources)
        case ["apis", group, version]:
            return _kinds(f"{group}/{version}", resources)
        case ["openapi", "v3"]:
            paths = {_root(resource): {"serverRelativeURL": f"/openapi/v3/{_root(resource)}"} for resource in resources}
            return {"paths": paths}
        case ["openapi", "v3", *root]:
            return _openapi("/".join(root), resources)
    return None


def _root(resource: Resource) -> str:
    return f"apis/{resource.api_version}" if "/" in resource.api_version else f"api/{resource.api_version}"


def _groups(resources: list[Resource]) -> dict[str, Any]:
    groups = []
    for api_version in sorted({resource.api_version for resource in resources if "/" in resource.api_version}):
        group, version = api_version.split("/")
        entry = {"groupVersion": api_version, "version": version}
        groups.append({"name": group, "versions": [entry], "preferredVersion": entry})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def _kinds(api_version: str, resources: list[Resource]) -> dict[str, Any] | None:
    listed = [
        {
            "name": resource.plural,
            "singularName": resource.kind.lower(),
            "namespaced": resource.namespaced,
            "kind": resource.kind,
            "verbs": VERBS,
        }
        for resource in resources
        if resource.api_version == api_version
    ]
    if not listed:
        return None
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api_version, "resources": listed}


def _openapi(root: str, resources: list[Resource]) -> dict[str, Any]:
    paths, schemas = {}, {}
    for resource in resources:
        if _root(resource) != root:
            continue
        kind = resource.group_version_kind
        operation = {
            "parameters": PARAMETERS,
            "x-kubernetes-group-version-kind": kind,
            "responses": {"200": {"description": "OK"}},
        }
        scope = "namespaces/{namespace}/" if resource.namespaced else ""
        patch = operation | {"x-kubernetes-action": "patch"}
        paths[f"/{root}/{scope}{resource.plural}/{{name}}"] = {"patch": patch, "post": operation}
        schemas[f"{kind['group'] or 'core'}.{kind['version']}.{kind['kind']}"] = {
            "type": "object",
            "x-kubernetes-group-version-kind": [kind],
            "x-kubernetes-preserve-unknown-fields": True,
        }
    info = {"title": "stand-in", "version": "0"}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": schemas}}
