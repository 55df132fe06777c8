"""Makes tests/data/crds from CustomResourceDefinition files of other projects: `python tests/support/kube/trim_crds.py FILES...`

Keeps the served stored version's schema, names and scope, and drops descriptions. The same input gives the same bytes.
"""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parents[2] / "data" / "crds"


def trim(crd: dict[str, Any]) -> dict[str, Any]:
    """What validation needs of one CustomResourceDefinition."""
    spec = crd["spec"]
    (version,) = [version for version in spec["versions"] if version["served"] and version["storage"]]
    return {
        "group": spec["group"],
        "version": version["name"],
        "kind": spec["names"]["kind"],
        "plural": spec["names"]["plural"],
        "namespaced": spec["scope"] == "Namespaced",
        "schema": _without_prose(version["schema"]["openAPIV3Schema"]),
    }


def _without_prose(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_prose(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    # A description is text; a property of that name is a schema.
    return {
        key: _without_prose(value)
        for key, value in schema.items()
        if not (key == "description" and isinstance(value, str))
    }


def main() -> None:
    for source in map(Path, sys.argv[1:]):
        trimmed = trim(yaml.load(source.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader))
        text = json.dumps(trimmed, separators=(",", ":")).encode()
        target = FOLDER / f"{trimmed['group']}_{trimmed['plural']}.json.gz"
        target.write_bytes(gzip.compress(text, mtime=0))
        print(f"{target.name}: {target.stat().st_size} bytes of {source.stat().st_size}")


if __name__ == "__main__":
    main()
