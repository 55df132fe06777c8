"""Every check of one object: its schema, built-in or custom, then the rules that no schema has. Needs kubernetes-validate and cel-python."""

import json
from functools import cache
from typing import Any

from tests.support.kube.crds import load_custom_kinds
from tests.support.kube.fault import Fault, joined
from tests.support.kube.ports import check_ports
from tests.support.kube.rayservice import check_rayservice
from tests.support.kube.rules import check_rules


def check_object(manifest: dict[str, Any], kube_version: str) -> list[Fault]:
    """Faults of one object under Kubernetes 1.31, say; those of the schema alone, if it has any, since the rules take a sound shape for granted."""
    faults = check_schema(manifest, kube_version)
    return faults or [*check_rules(manifest), *check_rayservice(manifest), *check_ports(manifest)]


def check_schema(manifest: dict[str, Any], kube_version: str) -> list[Fault]:
    """Schema and CEL. A kind that is neither built in nor in tests/data/crds is a fault."""
    return list(_check_schema(json.dumps(manifest, sort_keys=True), kube_version))


@cache
def _check_schema(text: str, kube_version: str) -> tuple[Fault, ...]:
    # Renderings of one chart repeat the same objects, and a check takes up to half a second.
    import kubernetes_validate

    manifest = json.loads(text)
    custom = load_custom_kinds().get((manifest.get("apiVersion", ""), manifest.get("kind", "")))
    if custom is not None:
        return tuple(custom.check(manifest) or custom.check_rules(manifest))
    try:
        kubernetes_validate.validate(manifest, kube_version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return (Fault(joined(*error.path), error.message[:300]),)
    except kubernetes_validate.SchemaNotFoundError:
        kind = f"{manifest.get('apiVersion')} {manifest.get('kind')}"
        return (Fault("", f"no schema of {kind} in Kubernetes {kube_version}"),)
    return ()
