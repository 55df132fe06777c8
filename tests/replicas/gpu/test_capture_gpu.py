"""Capturing rounds in a process in which engines have ended: what they left must not break a capture."""

import gc
from pathlib import Path

import pytest
import torch

from espalier.deploy.random_model.write import write_random_model
from espalier.replicas.config import EngineConfig
from espalier.replicas.gpu.round import RoundBuffers
from espalier.replicas.gpu.shard import GpuShard

pytestmark = pytest.mark.gpu


def some_graph() -> torch.cuda.CUDAGraph:
    graph, number = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        number.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def make_garbage(graph: torch.cuda.CUDAGraph) -> None:
    """A cycle that only the collector frees."""
    cycle: list[object] = [graph]
    cycle.append(cycle)


def test_graphs_of_an_ended_engine_are_not_destroyed_while_rounds_are_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = [some_graph() for _ in range(32)]
    compute = RoundBuffers.compute

    def littering(self: RoundBuffers, *args: object) -> None:
        if torch.cuda.is_current_stream_capturing() and graphs:
            make_garbage(graphs.pop())
        compute(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(RoundBuffers, "compute", littering)
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        write_random_model(tmp_path / "model", "tiny")
        shard = GpuShard(
            EngineConfig(
                model_path=tmp_path / "model",
                cache_dir=tmp_path,
                device="cuda",
                kv_tokens=512,
                max_lanes=4,
                batch_tokens=16,
            )
        )
    finally:
        gc.set_threshold(*threshold)
    assert not graphs or len(graphs) == 32 - shard.figures().graph_captures
    assert shard.figures().graph_captures > 4
    assert gc.isenabled()
