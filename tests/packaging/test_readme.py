"""What the README says that can be read off the code."""

import re
from pathlib import Path

import pytest
import yaml

from espalier.cluster.options import BY_NAME
from espalier.deploy.cli import build_parser
from espalier.deploy.options import markdown_table


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    return (root / "README.md").read_text(encoding="utf-8")


def test_the_table_of_options_is_the_one_in_the_code(readme: str) -> None:
    assert markdown_table() in readme


def test_links_lead_somewhere(readme: str, root: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", readme)
    assert [target for target in targets if "://" not in target and not (root / target).exists()] == []


def test_commands_parse(readme: str) -> None:
    commands = re.findall(r"(?:make serve ARGS='|espalier )(serve |check |bench )?(--[^'`\n#]+)", readme)
    assert len(commands) >= 4
    for name, arguments in commands:
        _, unknown = build_parser().parse_known_args([name.strip() or "serve", *arguments.split()])
        assert unknown == []


def test_the_example_file_has_known_keys(readme: str) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    content = yaml.safe_load(block)
    keys = set(content) - {"models"} | {key for entry in content["models"] for key in entry}
    assert keys <= set(BY_NAME)


def test_python_examples_compile(readme: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        compile(block, "README.md", "exec")
