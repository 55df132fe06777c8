"""Pods of any kind of object: where their templates are, and the labels that they will have."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TEMPLATED = {
    "Deployment": ("spec", "template"),
    "StatefulSet": ("spec", "template"),
    "DaemonSet": ("spec", "template"),
    "ReplicaSet": ("spec", "template"),
    "Job": ("spec", "template"),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}


@dataclass(frozen=True, slots=True)
class PodTemplate:
    """path: of the template in its object. role: `pod`, or `head` and `worker` in a Ray cluster. params: rayStartParams.

    added_labels: what the operator puts on the pod besides the template's own.
    """

    path: str
    role: str
    template: dict[str, Any]
    params: dict[str, str]
    added_labels: dict[str, str]

    @property
    def spec(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.template.get("spec") or {}
        return spec

    @property
    def labels(self) -> dict[str, str]:
        return self.added_labels | ((self.template.get("metadata") or {}).get("labels") or {})

    @property
    def containers(self) -> list[tuple[str, dict[str, Any]]]:
        """(path, container), init containers first."""
        return [
            (f"{self.path}/spec/{field}/{index}", container)
            for field in ("initContainers", "containers")
            for index, container in enumerate(self.spec.get(field) or [])
        ]


def pod_templates(manifest: dict[str, Any]) -> Iterator[PodTemplate]:
    """Every pod that the object makes."""
    kind = manifest.get("kind", "")
    if kind == "Pod":
        yield PodTemplate("", "pod", manifest, {}, {})
    elif kind in TEMPLATED:
        template: Any = manifest
        for key in TEMPLATED[kind]:
            template = template.get(key) or {}
        yield PodTemplate("/".join(TEMPLATED[kind]), "pod", template, {}, {})
    elif kind == "RayCluster":
        yield from _of_ray_cluster(manifest.get("spec") or {}, "spec")
    elif kind == "RayService":
        cluster = (manifest.get("spec") or {}).get("rayClusterConfig") or {}
        yield from _of_ray_cluster(cluster, "spec/rayClusterConfig")


def _of_ray_cluster(cluster: dict[str, Any], path: str) -> Iterator[PodTemplate]:
    groups = [("head", f"{path}/headGroupSpec", cluster.get("headGroupSpec") or {}, "headgroup")]
    groups += [
        ("worker", f"{path}/workerGroupSpecs/{index}", group, group.get("groupName", ""))
        for index, group in enumerate(cluster.get("workerGroupSpecs") or [])
    ]
    for role, where, group, name in groups:
        # KubeRay labels its pods so; ray.io/cluster has a generated name and is left out.
        added = {
            "app.kubernetes.io/created-by": "kuberay-operator",
            "app.kubernetes.io/name": "kuberay",
            "ray.io/group": name,
            "ray.io/is-ray-node": "yes",
            "ray.io/node-type": role,
            "ray.io/serve": "true",
        }
        yield PodTemplate(
            f"{where}/template", role, group.get("template") or {}, group.get("rayStartParams") or {}, added
        )
