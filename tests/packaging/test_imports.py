"""Imports go one way, kernels <- replicas <- cluster <- deploy, without cycles, and heavy packages stay where they belong."""

from pathlib import Path

import pytest

from tests.support.imports import LAYERS, imports_of, module_name, source_files

# Decisions about requests, blocks and routes are made without tensors; only the code that computes brings torch.
TORCHLESS = (
    "replicas/request.py",
    "replicas/errors.py",
    "replicas/config.py",
    "replicas/engine.py",
    "replicas/report.py",
    "replicas/stats.py",
    "replicas/output.py",
    "replicas/detokenizer.py",
    "replicas/tokenizer.py",
    "replicas/sampling/stops.py",
    "replicas/schedule",
    "replicas/cache/blocks.py",
    "replicas/cache/prefix.py",
    "replicas/cache/table.py",
    "cluster",
    "deploy/cli.py",
    "deploy/config.py",
    "deploy/options.py",
    "deploy/render.py",
    "deploy/locate.py",
    "deploy/local.py",
    "deploy/bench",
)


def loaded_by(root: Path) -> dict[str, dict[str, int]]:
    """Module of ours -> modules that it imports at load, with the line."""
    return {
        module_name(path): {found.target: found.line for found in imports_of(root, path) if found.at_load}
        for path in source_files(root)
    }


def test_imports_go_one_way(root: Path) -> None:
    wrong = []
    for path in source_files(root):
        layer = LAYERS.index(path.parts[0])
        for found in imports_of(root, path):
            parts = found.target.split(".")
            if parts[0] == "espalier" and len(parts) > 1 and parts[1] in LAYERS[layer + 1 :]:
                wrong.append(f"{path}:{found.line} imports {found.target}")
            if parts[0] in LAYERS:
                wrong.append(f"{path}:{found.line} imports {found.target}; the name is espalier.{found.target}")
            if parts[0] == "tests":
                wrong.append(f"{path}:{found.line} imports {found.target}")
    assert wrong == []


def test_no_cycles(root: Path) -> None:
    graph = loaded_by(root)
    state: dict[str, str] = {}
    cycles = []

    def visit(module: str, trail: tuple[str, ...]) -> None:
        if state.get(module) == "done":
            return
        if state.get(module) == "open":
            cycles.append(" -> ".join((*trail[trail.index(module) :], module)))
            return
        state[module] = "open"
        for target in graph[module]:
            if target in graph:
                visit(target, (*trail, module))
        state[module] = "done"

    for module in graph:
        visit(module, ())
    assert cycles == []


def test_triton_stays_in_kernels(root: Path) -> None:
    users = [
        f"{path}:{found.line}"
        for path in source_files(root)
        if path.parts[0] != "kernels"
        for found in imports_of(root, path)
        if found.target.split(".")[0] == "triton"
    ]
    assert users == []


def test_ray_starts_at_cluster(root: Path) -> None:
    users = [
        f"{path}:{found.line}"
        for path in source_files(root)
        if path.parts[0] in ("kernels", "replicas")
        for found in imports_of(root, path)
        if found.target.split(".")[0] == "ray"
    ]
    assert users == []


@pytest.mark.parametrize("place", TORCHLESS)
def test_decisions_load_without_torch(root: Path, place: str) -> None:
    graph = loaded_by(root)
    path = root / place
    files = [path] if path.suffix else [found for found in path.rglob("*.py") if "pb" not in found.parts]
    assert files
    offenders = []
    for file in files:
        start = module_name(file.relative_to(root))
        trail = _way_to(start, {"torch", "triton"}, graph)
        if trail:
            offenders.append(" -> ".join(trail))
    assert offenders == []


def _way_to(start: str, goals: set[str], graph: dict[str, dict[str, int]]) -> list[str]:
    """A chain of load-time imports from `start` to one of the goals' packages, or nothing."""
    waiting, seen = [[start]], {start}
    while waiting:
        trail = waiting.pop()
        for target in graph.get(trail[-1], {}):
            if target.split(".")[0] in goals:
                return [*trail, target]
            if target not in seen:
                seen.add(target)
                waiting.append([*trail, target])
    return []
