"""What tests of deployments need beyond `make install`: programs on the PATH and optional modules. Missing ones skip the test; in CI they fail it.

Call these in a test or a fixture, never at the top of a module: `make test` collects every file, also where nothing of this is installed.
"""

import importlib
import importlib.util
import os
import shutil
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest


def require_tool(*names: str) -> None:
    """Skip the running test unless all of these programs are on the PATH; with CI=true fail it."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        _miss(f"needs {', '.join(missing)} on the PATH")


def require_module(name: str) -> ModuleType:
    """The module, imported. Skip the running test where it is not installed; with CI=true fail it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A broken import inside an installed module is a failure of its own.
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        _miss(f"needs the module {name}; `make test-deploy` installs it")


def require_packaged_program(package: str, path: str) -> Path:
    """A program that an installed package carries among its files; the package itself is not imported."""
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    found = [Path(folder) / path for folder in folders if (Path(folder) / path).is_file()]
    if not found:
        _miss(f"needs {path} of the package {package}; `make test-deploy` installs it")
    return found[0]


def _miss(reason: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason}, and CI skips nothing")
    pytest.skip(reason)
