"""What our modules import, read with `ast` and never by importing. Used by tests/packaging."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LAYERS = ("kernels", "replicas", "cluster", "deploy")


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement's target. at_load: runs when the module is loaded (not in a function, nor under TYPE_CHECKING)."""

    target: str
    at_load: bool
    line: int


def source_files(root: Path) -> list[Path]:
    """Every Python file of the four folders, generated ones too, relative to the checkout."""
    return sorted(path.relative_to(root) for layer in LAYERS for path in (root / layer).rglob("*.py"))


def module_name(path: Path) -> str:
    """kernels/exl3/layout.py -> espalier.kernels.exl3.layout"""
    parts = path.with_suffix("").parts
    return ".".join(("espalier", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imports_of(root: Path, path: Path) -> list[Import]:
    """All imports of one file; `from a import b` counts as a.b when that is a module of ours, else as a."""
    package = module_name(path).split(".") if path.name == "__init__.py" else module_name(path).split(".")[:-1]
    return list(_walk(ast.parse((root / path).read_text(encoding="utf-8")), root, package, at_load=True))


def _walk(node: ast.AST, root: Path, package: list[str], *, at_load: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, at_load, child.lineno)
        elif isinstance(child, ast.ImportFrom):
            base = package[: len(package) - child.level + 1] if child.level else []
            module = ".".join([*base, *([child.module] if child.module else [])])
            for alias in child.names:
                full = f"{module}.{alias.name}"
                yield Import(full if _is_ours(root, full) else module, at_load, child.lineno)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for branch, loads in ((child.body, False), (child.orelse, at_load)):
                for statement in branch:
                    yield from _walk(ast.Module([statement], []), root, package, at_load=loads)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, root, package, at_load=at_load and not inside)


def _is_ours(root: Path, name: str) -> bool:
    head, _, rest = name.partition(".")
    place = root.joinpath(*rest.split("."))
    return head == "espalier" and bool(rest) and (place.with_suffix(".py").is_file() or place.is_dir())
