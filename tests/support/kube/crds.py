"""CRD schemas -> validators of custom resources, as strict as an API server: defaults first, then types, unknown fields, list keys, CEL rules.

Knows the trimmed schemas of tests/data/crds. Not what operators check in code of their own (rayservice.py), nor what is common to all kinds
(rules.py). CEL rules are a method of their own, because they alone need cel-python.
"""

import copy
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

from tests.support.kube.fault import Fault, joined

FOLDER = Path(__file__).resolve().parents[2] / "data" / "crds"
LABEL_VALUE = r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"
METADATA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "maxLength": 253, "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"},
        "namespace": {"type": "string", "maxLength": 63, "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
        "labels": {
            "type": "object",
            "additionalProperties": {"type": "string", "maxLength": 63, "pattern": LABEL_VALUE},
        },
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
        "finalizers": {"type": "array", "items": {"type": "string"}},
        "ownerReferences": {"type": "array"},
    },
}
PROSE = ("description", "default", "example", "externalDocs")


@dataclass(frozen=True)
class CustomKind:
    """One custom kind. schema: openAPIV3Schema as the CRD has it, without prose."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool
    schema: dict[str, Any]

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}"

    @cached_property
    def _validator(self) -> Draft202012Validator:
        schema = _strict(self.schema)
        schema["properties"] |= {"metadata": METADATA, "apiVersion": {"type": "string"}, "kind": {"type": "string"}}
        schema["required"] = sorted({*schema.get("required", ()), "apiVersion", "kind", "metadata"})
        return Draft202012Validator(schema)

    def with_defaults(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """A copy as the API server would keep it: nulls of fields that take none are gone, the CRD's defaults are filled in."""
        filled = copy.deepcopy(manifest)
        _fill(self.schema, filled)
        return filled

    def check(self, manifest: dict[str, Any]) -> list[Fault]:
        """Types, enums, patterns, unknown fields and keys of lists."""
        filled = self.with_defaults(manifest)
        errors = [
            Fault(joined(*error.absolute_path), error.message[:300]) for error in self._validator.iter_errors(filled)
        ]
        return errors + list(_repeated(self.schema, filled, ""))

    def check_rules(self, manifest: dict[str, Any]) -> list[Fault]:
        """The CEL rules. Call it on what `check` finds nothing in; a rule that cannot be evaluated is a fault too."""
        return list(_broken_rules(self.schema, self.with_defaults(manifest), ""))


@cache
def load_custom_kinds(folder: Path = FOLDER) -> dict[tuple[str, str], CustomKind]:
    """(apiVersion, kind) -> the kind, for every file of the folder."""
    kinds = [CustomKind(**json.loads(gzip.decompress(path.read_bytes()))) for path in sorted(folder.glob("*.json.gz"))]
    return {(kind.api_version, kind.kind): kind for kind in kinds}


def _strict(schema: dict[str, Any], refuse_unknown: bool = True) -> dict[str, Any]:
    """OpenAPI of Kubernetes -> JSON schema; inside anyOf, oneOf, allOf and not unknown fields stay allowed, as those only add to the outside."""
    out = {key: value for key, value in schema.items() if key not in PROSE}
    if out.pop("x-kubernetes-int-or-string", None):
        out.pop("anyOf", None)
        out["type"] = ["integer", "string"]
    if out.pop("nullable", None) and "type" in out:
        out["type"] = [*([out["type"]] if isinstance(out["type"], str) else out["type"]), "null"]
        if "enum" in out:
            out["enum"] = [*out["enum"], None]
    if "properties" in out:
        out["properties"] = {key: _strict(value, refuse_unknown) for key, value in out["properties"].items()}
        if out.get("x-kubernetes-embedded-resource"):
            out["properties"].setdefault("metadata", {"type": "object"})
        opened = out.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in out
        if refuse_unknown and not opened:
            out["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(out.get(key), dict):
            out[key] = _strict(out[key], refuse_unknown)
    if "not" in out:
        out["not"] = _strict(out["not"], False)
    for key in ("allOf", "anyOf", "oneOf"):
        if key in out:
            out[key] = [_strict(entry, False) for entry in out[key]]
    return out


def _fill(schema: dict[str, Any], value: Any) -> None:
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        for key in [key for key, item in value.items() if item is None and not properties.get(key, {}).get("nullable")]:
            del value[key]
        for key, inner in properties.items():
            if key not in value and "default" in inner:
                value[key] = copy.deepcopy(inner["default"])
        for key, item in value.items():
            _fill(_of_key(schema, key), item)
    elif isinstance(value, list):
        for item in value:
            _fill(schema.get("items", {}), item)


def _of_key(schema: dict[str, Any], key: str) -> dict[str, Any]:
    inner = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
    return inner if isinstance(inner, dict) else {}


def _repeated(schema: dict[str, Any], value: Any, path: str) -> Iterator[Fault]:
    """Entries of a map-like list with the same keys, and of a set-like one that are equal."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _repeated(_of_key(schema, key), item, joined(path, key))
    elif isinstance(value, list):
        keys = schema.get("x-kubernetes-list-map-keys")
        seen: set[str] = set()
        if keys or schema.get("x-kubernetes-list-type") == "set":
            for index, item in enumerate(value):
                identity = {key: item.get(key) for key in keys} if keys and isinstance(item, dict) else item
                text = json.dumps(identity, sort_keys=True)
                if text in seen:
                    yield Fault(joined(path, index), f"the list has {text} already")
                seen.add(text)
        for index, item in enumerate(value):
            yield from _repeated(schema.get("items", {}), item, joined(path, index))


def _broken_rules(schema: dict[str, Any], value: Any, path: str) -> Iterator[Fault]:
    for rule in schema.get("x-kubernetes-validations", ()):
        # A transition rule compares with the object before the write; there is none here.
        if "oldSelf" not in rule["rule"]:
            yield from _broken_rule(rule["rule"], rule.get("message", rule["rule"]), value, path)
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _broken_rules(_of_key(schema, key), item, joined(path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _broken_rules(schema.get("items", {}), item, joined(path, index))


def _broken_rule(rule: str, message: str, value: Any, path: str) -> Iterator[Fault]:
    from celpy import CELEvalError, json_to_cel

    try:
        kept = bool(_program(rule).evaluate({"self": json_to_cel(value)}))
    except CELEvalError as error:
        yield Fault(path, f"rule not evaluated ({error}): {rule}")
        return
    if not kept:
        yield Fault(path, message)


@cache
def _program(rule: str) -> Any:
    import celpy

    environment = celpy.Environment()
    return environment.program(environment.compile(rule))
