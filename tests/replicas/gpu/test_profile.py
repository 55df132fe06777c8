"""What the profile makes of a trace: kinds of kernels by their neighbours, time shared out among overlapping ones, gaps, and its tables."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.replicas.config import EngineConfig
from espalier.replicas.errors import InvalidRequestError
from espalier.replicas.gpu.profile.kinds import Kind, kinds_of
from espalier.replicas.gpu.profile.results import LoopProfile, RoundProfile, idle_share, parts_of, report, report_json
from espalier.replicas.gpu.profile.timeline import Work, gaps, own_times, span, split_at, union, work_of
from espalier.replicas.request import SamplingParams
from tests.support.interpret import interpreted

LAYER = (
    *("_add_norm_rotate_kernel", "rows_mma", "_norm_rotate_store_kernel", "attend_split", "merge_row"),
    *("_rotate_input_kernel", "rows_mma", "_add_norm_rotate_kernel", "rows_mma", "_silu_mul_rotate_kernel", "rows_mma"),
)
BEFORE = ("_apply_updates_kernel", "_lay_out_kernel", "_gather_kernel")
AFTER = (
    *("_gather_kernel", "_gather_kernel", "_add_norm_rotate_kernel", "rows_mma"),
    *("score_kernel", "choose_kernel", "_keep_drawn_kernel"),
)
ROUND = BEFORE + LAYER * 2 + AFTER
LINEARS_OF_LAYER = [Kind.QKV, Kind.OUT, Kind.GATE_UP, Kind.DOWN]


def products(names: tuple[str, ...], product: str) -> list[Kind]:
    return [kind for name, kind in zip(names, kinds_of(names), strict=True) if name == product]


def test_a_product_is_known_by_its_neighbours() -> None:
    assert products(ROUND, "rows_mma") == [*LINEARS_OF_LAYER, *LINEARS_OF_LAYER, Kind.HEAD]


def test_a_linear_of_several_kernels_is_one_linear() -> None:
    twice = tuple(name for name in ROUND for _ in range(2 if name == "rows_mma" else 1))
    expected = [kind for kind in [*LINEARS_OF_LAYER, *LINEARS_OF_LAYER, Kind.HEAD] for _ in range(2)]
    assert products(twice, "rows_mma") == expected


def test_plain_linears_read_what_is_not_rotated() -> None:
    names = tuple(
        {"rows_mma": "_dense_kernel", "_silu_mul_rotate_kernel": "_silu_mul_kernel"}.get(name, name)
        for name in ROUND
        if name != "_rotate_input_kernel"
    )
    assert products(names, "_dense_kernel") == [*LINEARS_OF_LAYER, *LINEARS_OF_LAYER, Kind.HEAD]


def test_down_may_be_rotated_apart_from_its_gate() -> None:
    names = ("_silu_mul_kernel", "_rotate_input_kernel", "rows_wgmma", "_add_norm_rotate_kernel")
    assert products(names, "rows_wgmma") == [Kind.DOWN]


def test_other_kernels_are_known_by_name() -> None:
    names = ("merge_row", "_norm_rotate_store_kernel", "guess_kernel", "Memcpy DtoH (Device -> Pinned)", "a_new_one")
    assert kinds_of(names) == [Kind.ATTENTION, Kind.ROPE, Kind.SAMPLER, Kind.COPIES, Kind.OTHER]
    assert kinds_of(("rows_mma",)) == [Kind.OTHER]


@pytest.mark.slow
@interpreted
def test_every_kernel_of_a_real_round_has_its_kind_and_the_host_its_ranges() -> None:
    from triton.runtime.interpreter import InterpretedFunction

    from espalier.replicas.gpu.profile.capture import _Sequences
    from espalier.replicas.gpu.rounds import RoundNeed
    from espalier.replicas.gpu.shard import GpuShard
    from tests.support.tiny import make_tiny_checkpoint

    launched: list[str] = []
    run = InterpretedFunction.run

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(self.fn.__name__)
        return run(self, *args, **kwargs)

    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        config = EngineConfig(
            model_path=make_tiny_checkpoint(folder / "model", layers=2),
            device="cuda",
            cache_dir=folder,
            kv_tokens=64,
            max_context=32,
            max_lanes=1,
            batch_tokens=16,
            nvtx=True,
        )
        marks: list[str] = []
        patch.setattr(torch.cuda.nvtx, "range_push", marks.append)
        patch.setattr(torch.cuda.nvtx, "range_pop", lambda: marks.append("end"))
        shard = GpuShard(config, torch.device("cpu"))
        sequences = _Sequences(shard, 1, 1, 4, SamplingParams(temperature=0.0, ignore_eos=True))
        marks.clear()
        drawn = shard.execute(sequences.step()).sampled
        assert marks == ["plan", "end", "launch", "pack", "end", "run", "end", "end", "wait", "end"]
        (track,) = shard.tracks.values()
        patch.setattr(InterpretedFunction, "run", recorded)
        shape = track.shapes.choose(RoundNeed(1, 1, 1, 4, greedy=True))
        track.repeat(shape)
        names = tuple(launched)
        assert shard.execute(sequences.step()).sampled == drawn, "a repeated round changed something"
        sequences.end()
    kinds = kinds_of(names)
    assert Kind.OTHER not in kinds, [name for name, kind in zip(names, kinds, strict=True) if kind is Kind.OTHER]
    linears = [kind for kind in kinds if kind in (*LINEARS_OF_LAYER, Kind.HEAD)]
    # Where Triton interprets, a linear may be two kernels: partial sums, and what finishes them.
    found = [kind for index, kind in enumerate(linears) if index == 0 or kind is not linears[index - 1]]
    assert found == [*LINEARS_OF_LAYER, *LINEARS_OF_LAYER, Kind.HEAD]
    assert {Kind.FUSIONS, Kind.ROPE, Kind.ATTENTION, Kind.SAMPLER, Kind.ROUND} <= set(kinds)
    assert names.count("_apply_updates_kernel") == names.count("_lay_out_kernel") == 1
    assert names[0] == "_apply_updates_kernel"


def test_overlapping_work_is_shared_out() -> None:
    # b waits from 2 on for a, which ends at 4; c lies inside b; then nothing until 10.
    work = [Work(0, 4, "a"), Work(2, 7, "b"), Work(5, 6, "c"), Work(10, 11, "d")]
    assert own_times(work) == [4, 3, 0, 1]
    assert union(work) == 8
    assert span(work) == 11
    assert gaps(work) == [0, 0, 3]
    assert own_times([]) == gaps([]) == [] and union([]) == span([]) == 0


def test_parts_begin_with_the_first_of_a_round() -> None:
    work = [Work(time, time + 1, name) for time, name in enumerate("zabcab")]
    assert [[item.name for item in part] for part in split_at(work, "a")] == [["a", "b", "c"], ["a", "b"]]
    assert split_at(work, "x") == []


def trace(names: tuple[str, ...], rounds: int, step: float = 10.0) -> dict[str, Any]:
    """A trace in which kernels take 8 us every `step`, out of order, among events of the host."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name"},
        {"cat": "cuda_runtime", "name": "x", "ts": 0, "dur": 9},
    ]
    events += [
        {"cat": "gpu_memcpy" if name.startswith("Memcpy") else "kernel", "name": name, "ts": step * place, "dur": 8.0}
        for place, name in enumerate(names * rounds)
    ]
    return {"traceEvents": events[::-1]}


def test_work_is_read_from_a_trace_in_order() -> None:
    found = work_of(trace(("a", "Memcpy HtoD"), 2))
    assert [(item.name, item.start, item.end, item.is_copy) for item in found] == [
        ("a", 0, 8, False),
        ("Memcpy HtoD", 10, 18, True),
        ("a", 20, 28, False),
        ("Memcpy HtoD", 30, 38, True),
    ]


def test_parts_of_a_round() -> None:
    parts = parts_of(work_of(trace((*ROUND, "a_new_one"), 3)))
    assert parts is not None
    assert parts.num_kernels == len(ROUND) + 1
    assert parts.busy_us == sum(parts.own.values()) == sum(parts.full.values()) == 8 * parts.num_kernels
    assert parts.gaps_us == 2 * (parts.num_kernels - 1)
    assert parts.span_us == parts.busy_us + parts.gaps_us
    assert parts.own[Kind.QKV] == 16 and parts.own[Kind.HEAD] == 8 and parts.own[Kind.ATTENTION] == 32
    assert parts.unknown == ("a_new_one",)
    assert parts_of([]) is None


def test_idle_share_leaves_out_the_ends_of_a_window() -> None:
    seconds, rounds, idle = idle_share(work_of(trace(ROUND, 10)))
    assert rounds == 6
    assert seconds == pytest.approx((60 * len(ROUND) - 2) / 10 / 1e5)
    assert idle == pytest.approx(0.2, abs=0.01)
    assert idle_share(work_of(trace(ROUND, 8)))[2] is None
    assert idle_share([]) == (0.0, 0, None)


def test_tables_and_json_have_every_figure() -> None:
    rounds = [
        RoundProfile(
            rows=rows,
            context=512,
            is_prompt=is_prompt,
            source="graph",
            wall_us=400.0,
            wall_quartiles=(399.0, 402.0),
            host_us=70.0,
            chained_us=410.0,
            parts=parts,
        )
        for rows, is_prompt, parts in (
            (1, False, parts_of(work_of(trace((*ROUND, "a_new_one"), 3)))),
            (8, False, None),
            (82, True, None),
        )
    ]
    loops = [LoopProfile(rows=rows, round_us=500.0, window_s=1.0, window_rounds=9, idle_share=0.25) for rows in (1, 8)]
    text = report("A head", rounds, loops)
    assert text.startswith(
        "A head\n\n| us | 1 rows | 8 rows | 82 of a prompt, to 512 |\n| --- | ---: | ---: | ---: |\n| qkv | 16 |  |  |\n"
    )
    assert "| **wall of a round** | 400 | 400 | 400 |" in text
    share = 100 * (1 - 8 * (len(ROUND) + 1) / 400)
    assert f"| share that is no kernel | {share:.1f}% |  |  |" in text
    assert "| so in tokens a second | 2,439 | 19,512 | 200,000 |" in text
    assert "| its tokens a second | 2,000 | 16,000 |  |" in text
    assert "| of it beyond the wall | 20.0% | 20.0% |  |" in text
    assert "Counted as other: a_new_one." in text
    assert "8 rows: the profiler saw no kernels (graph)." in text
    assert "engine loop" not in report("A head", rounds, [])
    found = json.loads(report_json({"device": "a card"}, rounds, loops))
    assert found["setup"] == {"device": "a card"}
    assert found["rounds"][0]["parts"]["own"]["head"] == 8.0 and found["rounds"][1]["parts"] is None
    assert found["loops"][1]["idle_share"] == 0.25


def test_ranges_mark_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from espalier.replicas.gpu.ranges import OFF, Ranges

    marks: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", marks.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: marks.append("end"))
    with OFF("plan"), OFF("pack"):
        pass
    assert marks == []
    ranges = Ranges(enabled=True)
    with ranges("launch"), ranges("pack"):
        pass
    assert marks == ["launch", "pack", "end", "end"]
    with pytest.raises(ValueError, match="x"), ranges("wait"):
        raise ValueError("x")
    assert marks[-1] == "end"
    with pytest.raises(InvalidRequestError, match="nvtx: "):
        EngineConfig(model_path=Path("model"), device="cpu", nvtx=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "--rows"),
        (["--rows", "64", "--batch-tokens", "32"], "--batch-tokens"),
        (["--prompts", "1"], "--prompts"),
        (["--prompt-repeats", "1"], "--prompt-repeats"),
        (["--rows", "1", "--batch-tokens", "1"], "--batch-tokens"),
        (["--context", "256"], "--context"),
        (["--rows", "64", "--context", "4096"], "--no-loop"),
        ([], "GPU"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from espalier.replicas.gpu.profile.__main__ import main

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["model", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--rows", "--prompts"])
def test_the_command_names_what_is_no_list(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    from espalier.replicas.gpu.profile.__main__ import main

    with pytest.raises(SystemExit):
        main(["model", option, "1,x"])
    assert f"{option}: '1,x' is not a list of numbers" in capsys.readouterr().err
