"""A missing tool skips a test on a person's machine and fails it in CI."""

import sys
from pathlib import Path

import pytest

from tests.support.tools import require_module, require_packaged_program, require_tool


@pytest.mark.parametrize(("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_what_is_missing(monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[Exception]) -> None:
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="needs no-such-tool, no-other on the PATH"):
        require_tool("sh", "no-such-tool", "no-other")
    with pytest.raises(outcome, match=r"needs the module no_such\.part"):
        require_module("no_such.part")
    with pytest.raises(outcome, match="needs bin/x of the package no_such"):
        require_packaged_program("no_such", "bin/x")
    with pytest.raises(outcome, match="needs bin/x of the package json"):
        require_packaged_program("json", "bin/x")


def test_what_is_there() -> None:
    require_tool("sh")
    assert require_module("json.decoder").__name__ == "json.decoder"
    assert require_packaged_program("json", "decoder.py").name == "decoder.py"


def test_an_import_that_breaks_inside_is_no_missing_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_inside.py").write_text("import no_such_inner\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_inner"):
        require_module("broken_inside")
    assert "broken_inside" not in sys.modules
