"""The chart's README against its values: one row for each, with the default that holds, and nothing that is not there."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.kube.chart import CHART, EXAMPLES, ROOT

README = (CHART / "README.md").read_text(encoding="utf-8")
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
ROW = re.compile(r"^\| `([A-Za-z.]+)` \| (.*?) ?\| (.*) \|$", re.MULTILINE)
ROWS = {match[1]: match[2] for match in ROW.finditer(README.partition("## Values")[2])}


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Paths that need a row: of what is no map, or empty. A map that has a row itself needs none for its keys."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value and path not in ROWS:
            yield from leaves(value, f"{path}.")
        else:
            yield path


def value_at(path: str) -> Any:
    value: Any = VALUES
    for key in path.split("."):
        value = value[key]
    return value


def test_every_value_has_a_row() -> None:
    assert sorted(set(leaves(VALUES)) - ROWS.keys()) == []


def test_every_row_has_a_value() -> None:
    assert len(ROWS) > 100
    assert sorted(ROWS.keys() - set(leaves(VALUES))) == []


def test_defaults_are_those_of_the_values() -> None:
    wrong = {}
    for path, cell in ROWS.items():
        # A cell without code tells of a default in words.
        if cell.startswith("`") or not cell:
            written = yaml.safe_load(cell.strip("`"))
            if written != value_at(path):
                wrong[path] = (written, value_at(path))
    assert wrong == {}
    assert sum(not cell.startswith("`") for cell in ROWS.values()) < 5


def test_every_value_is_explained() -> None:
    assert [match[1] for match in ROW.finditer(README) if not match[3].strip()] == []


def test_links_and_named_files_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    paths = re.findall(r"(?:helm|deploy|docs)/[A-Za-z0-9/_.-]+\w", README)
    assert links
    assert [link for link in links if not (CHART / link).exists()] == []
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_example_is_shown() -> None:
    assert [name for name in EXAMPLES if f"]({name})" not in README] == []
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize("anchor", sorted(set(re.findall(r"\]\(#([^)]+)\)", README))))
def test_anchors_lead_to_headings(anchor: str) -> None:
    headings = {
        re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
        for line in README.splitlines()
        if line[:1] == "#"
    }
    assert anchor in headings
