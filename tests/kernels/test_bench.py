"""The benchmark harness: cases by name, results to a file and back, tables and means from known times; timing itself on a GPU."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.kernels.bench import __main__ as command
from espalier.kernels.bench import results
from espalier.kernels.bench.peer import PeerTimes, peer_times
from espalier.kernels.bench.registry import (
    CUBLAS,
    OURS,
    BenchCase,
    Call,
    Inputs,
    Workload,
    all_cases,
    copies_past_l2,
    select,
)
from espalier.kernels.bench.report import markdown
from espalier.kernels.bench.results import COOL, HOT, STEADY, Limits, Run, Timing
from espalier.kernels.bench.runner import measure, measure_case
from espalier.kernels.bench.warm import warm


def unused(inputs: Inputs) -> Workload:
    raise AssertionError("listing makes no inputs")


CASES = [
    BenchCase("linear", {"in": 5120, "rate": rate, "rows": rows}, unused)
    for rate in (3.0, 3.5, 4)
    for rows in (1, 8, 16)
] + [BenchCase("norm", {"width": 5120, "rows": 8}, unused)]


def test_a_name_tells_op_and_labels() -> None:
    assert CASES[0].name == "linear/in=5120,rate=3,rows=1"
    assert CASES[3].name == "linear/in=5120,rate=3.5,rows=1"


@pytest.mark.parametrize(
    ("patterns", "only", "count"),
    [
        ([], {}, 10),
        (["linear"], {}, 9),
        (["norm", "linear/*rows=1"], {}, 4),
        (["linear"], {"rows": ["1", "8"]}, 6),
        ([], {"rows": ["8"], "rate": ["3", "3.5"]}, 2),
        ([], {"width": ["5120"]}, 1),
        (["inear"], {}, 0),
    ],
)
def test_selection(patterns: list[str], only: dict[str, list[str]], count: int) -> None:
    assert len(select(CASES, patterns, only)) == count


def test_every_op_can_be_listed_without_a_gpu() -> None:
    pytest.importorskip("triton")
    cases, broken = all_cases()
    assert broken == {}
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)


def test_an_op_that_cannot_be_imported_hides_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(
        "from espalier.kernels.bench.registry import BenchCase\ndef cases(): return [BenchCase('good', {}, None)]"
    )
    (tmp_path / "bad.py").write_text("import no_such_package")
    import espalier.kernels.bench as package

    monkeypatch.setattr(package, "__path__", [str(tmp_path)])
    cases, broken = all_cases()
    assert [case.op for case in cases] == ["good"]
    assert broken == {"bad": "ModuleNotFoundError: No module named 'no_such_package'"}


def test_inputs_are_shared_by_neighbours_that_say_so() -> None:
    inputs, made = Inputs(torch.device("cpu")), []
    for shares in ("a", "a", "b", "a", None, None):
        inputs.begin(BenchCase("any", {}, product, shares=shares))
        made.append(inputs.once("w", lambda: inputs.randn(4)))
    assert made[0] is made[1] and made[0].dtype == torch.float16
    assert len({id(tensor) for tensor in made}) == 5


@pytest.mark.parametrize(("num_bytes", "copies"), [(44 << 20, 6), (953 << 20, 1), (1 << 10, 16), (0, 16)])
def test_copies_go_past_the_l2(num_bytes: int, copies: int) -> None:
    assert copies_past_l2(num_bytes) == copies


def linear_labels(rate: float, codebook: str, rows: int, num_in: int = 5120, num_out: int = 17408) -> dict[str, Any]:
    return {"in": num_in, "out": num_out, "rate": rate, "codebook": codebook, "rows": rows}


@pytest.mark.parametrize(
    ("labels", "times"),
    [
        (linear_labels(4.0, "mul1", 1), PeerTimes(46.0, 32.4)),
        (linear_labels(4, "mul1", 8), PeerTimes(48.6, None)),
        (linear_labels(4, "mcg", 1), PeerTimes(48.8, None)),
        (linear_labels(6, "mul1", 1, 5120, 248320), PeerTimes(580.1, 565.7)),
        (linear_labels(3.5, "mul1", 1), None),
        (linear_labels(4, "mcg", 256), None),
        (linear_labels(4, "mul1", 17), None),
        ({"width": 5120}, None),
    ],
)
def test_peer_times(labels: dict[str, Any], times: PeerTimes | None) -> None:
    assert peer_times(labels) == times


def timing(labels: dict[str, Any], us: float, call: str = OURS, mode: str = STEADY, op: str = "linear") -> Timing:
    return Timing(
        op=op, labels=labels, call=call, mode=mode, us=us, spread=0.01, num_bytes=44_564_480, flops=178_257_920
    )


def made_run(*timings: Timing, failures: dict[str, str] | None = None) -> Run:
    return Run(
        device="NVIDIA H200",
        numerics_id="exl3-k16-s8x512-v1/sm90",
        torch="2.11.0",
        triton="3.6.0",
        commit="0123456789ab",
        date="2026-11-30",
        limits=Limits(copy_gb_s=4260.0, product_tflop_s=787.0),
        timings=timings,
        failures=failures or {},
    )


def test_results_come_back_from_a_file(tmp_path: Path) -> None:
    run = made_run(timing(linear_labels(4.0, "mul1", 1), 25.0), timing({"width": 64}, 3.0, op="norm"))
    results.save(run, tmp_path / "run.json")
    assert results.load(tmp_path / "run.json") == run
    results.save(dataclasses.replace(run, timings=()), tmp_path / "empty.json")
    assert results.load(tmp_path / "empty.json").timings == ()


@pytest.mark.parametrize("text", ["", "{}", '{"limits": {}, "timings": []}', "[1]"])
def test_a_file_of_something_else_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is no result"):
        results.load(tmp_path / "other.json")


def lines_with(page: str, start: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith(f"| {start}")
    ]


def test_a_row_has_rates_shares_and_ratios() -> None:
    labels = linear_labels(4.0, "mul1", 1)
    page = markdown(
        made_run(timing(labels, 25.0), timing(labels, 28.7, call="portable"), timing(labels, 45.4, call=CUBLAS))
    )
    ((*_, us, spread, gb_s, of_copy, tflop_s, of_product, portable, cublas, ratio, peer, accurate, lossy),) = (
        lines_with(page, "5120 | 17408 | 4 | mul1 | 1")
    )
    assert (us, spread, gb_s, of_copy) == ("25.0", "1.0%", "1783", "42%")
    assert (tflop_s, of_product, portable) == ("7.1", "1%", "28.7")
    assert (cublas, ratio, peer, accurate, lossy) == ("45.4", "1.82", "46.0", "1.84", "1.30")
    assert "commit 0123456789ab" in page
    assert "Triton 3.6.0" in page


def test_means_are_geometric_over_what_the_peer_has() -> None:
    page = markdown(
        made_run(
            timing(linear_labels(4.0, "mul1", 1), 23.0),  # 2.0 of 46.0
            timing(linear_labels(4.0, "mcg", 1), 12.2),  # 4.0 of 48.8; has no lossy path
            timing(linear_labels(3.5, "mul1", 1), 1.0),  # the peer was not timed
            timing(linear_labels(4.0, "mul1", 8), 24.3),  # 2.0 of 48.6
            timing(linear_labels(4.0, "mul1", 8), 48.6, call="portable"),
            timing(linear_labels(4.0, "mul1", 2048), 646.6, mode=COOL),
            timing(linear_labels(4.0, "mul1", 2048), 1293.2, mode=HOT),
        )
    )
    (accurate,), (lossy,) = lines_with(page, "1-2 accurate"), lines_with(page, "1-2 lossy")
    assert accurate == ["1-2 accurate", STEADY, "1.4", "1.9", f"{math.sqrt(8):.2f} (2)", ""]
    assert lossy[4:] == [f"{32.4 / 23:.2f} (1)", ""]
    assert lines_with(page, "4-16")[0][4:] == ["2.00 (1)", "1.00 (1)"]
    assert [row[1:5] for row in lines_with(page, "2048-8192")] == [
        [COOL, "0.95", "1.15", "1.00 (1)"],
        [HOT, "0.95", "1.15", "0.50 (1)"],
    ]


def test_other_forms_stand_beside_the_dispatched_one() -> None:
    labels = [linear_labels(4.0, "mul1", 8), linear_labels(3.0, "mul1", 8)]
    page = markdown(
        made_run(
            timing(labels[0], 20.0),
            timing(labels[0], 20.0, call="portable"),
            timing(labels[1], 10.0),
            timing(labels[1], 12.1, call="portable"),
            timing(labels[1], 99.0, call=CUBLAS),
        )
    )
    assert lines_with(page, "portable") == [["portable", "8", STEADY, "1.10 (2)", "1.21"]]


def test_rates_stand_beside_their_bits() -> None:
    page = markdown(
        made_run(
            timing(linear_labels(4.0, "mul1", 8), 20.0),
            timing(linear_labels(3.0, "mul1", 8), 16.0),
            timing(linear_labels(3.0, "mul1", 2048), 300.0, mode=COOL),
            timing(linear_labels(4.0, "mul1", 2048), 300.0, mode=COOL),
            timing(linear_labels(3.0, "mcg", 8), 15.0),  # not timed at 4 bits
        )
    )
    assert lines_with(page, "3 | mul1") == [["3", "mul1", "0.75", "0.80 (1)", "1.00 (1)"]]
    assert lines_with(page, "3 | mcg") == []


def test_runs_of_one_commit_are_one_page() -> None:
    first, second = made_run(timing({"width": 1}, 1.0, op="a")), made_run(timing({"width": 2}, 2.0, op="b"))
    assert results.merge([first, second]).timings == (*first.timings, *second.timings)
    with pytest.raises(ValueError, match="differ in their commit: 0123456789ab and fedcba"):
        results.merge([first, dataclasses.replace(second, commit="fedcba")])


def test_a_run_without_linears_has_no_means_and_tells_failures() -> None:
    page = markdown(made_run(timing({"width": 64}, 3.0, op="norm"), failures={"norm/width=63": "ValueError: odd"}))
    assert "against the peer" not in page
    assert "- `norm/width=63`: ValueError: odd" in page


def test_commands_that_need_no_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "all_cases", lambda: (CASES, {"broken": "ImportError: why"}))
    assert command.main(["list", "linear", "--rows", "1,16", "--only", "rate=3.5"]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["linear/in=5120,rate=3.5,rows=1", "linear/in=5120,rate=3.5,rows=16"]
    assert printed.err == "not available: broken: ImportError: why\n"
    assert command.main(["list", "nothing"]) == 2
    assert "no case matches" in capsys.readouterr().err
    results.save(made_run(timing(linear_labels(4.0, "mul1", 1), 25.0)), tmp_path / "run.json")
    assert command.main(["report", str(tmp_path / "run.json")]) == 0
    assert capsys.readouterr().out.startswith("# Kernels on one NVIDIA H200, 2026-11-30\n")
    assert command.main(["report", str(tmp_path / "absent.json")]) == 2


@pytest.mark.parametrize("name", ["run", "compile"])
def test_timing_without_a_gpu_is_refused(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(command, "all_cases", lambda: (CASES, {}))
    assert command.main([name]) == 2
    assert f"`{name}` needs an NVIDIA GPU" in capsys.readouterr().err


def product(inputs: Inputs, power_bound: bool = False) -> Workload:
    size = 2048
    weights = inputs.once("w", lambda: [inputs.randn(size, size) for _ in range(4)])
    x, out, other = inputs.randn(64, size), inputs.empty(64, size), inputs.empty(64, size)
    return Workload(
        {
            OURS: Call(lambda i: torch.mm(x, weights[i], out=out), copies=4),
            "twice": Call(lambda i: [torch.mm(x, weights[i], out=other) for _ in range(2)], copies=4),
        },
        num_bytes=weights[0].nbytes,
        flops=2 * 64 * size**2,
        power_bound=power_bound,
    )


@pytest.mark.gpu
def test_times_are_of_one_call() -> None:
    timings = measure_case(BenchCase("product", {"rows": 64}, product), Inputs(torch.device("cuda", 0)))
    us = {found.call: found.us for found in timings}
    assert [found.mode for found in timings] == [STEADY, STEADY]
    # 8 MB of weights at 10 TB/s are 0.8 us.
    assert 0.8 < us[OURS] < 1000
    assert 1.4 < us["twice"] / us[OURS] < 2.6


@pytest.mark.gpu
def test_long_products_are_timed_cool_and_hot() -> None:
    case = BenchCase("product", {"rows": 64}, lambda inputs: product(inputs, power_bound=True))
    timings = measure_case(case, Inputs(torch.device("cuda", 0)))
    assert [(found.call, found.mode) for found in timings] == [
        (OURS, COOL),
        ("twice", COOL),
        (OURS, HOT),
        ("twice", HOT),
    ]


@pytest.mark.gpu
def test_a_case_that_fails_loses_no_other() -> None:
    def broken(inputs: Inputs) -> Workload:
        raise RuntimeError("does not launch")

    cases = [BenchCase("broken", {}, broken), BenchCase("product", {}, product)]
    failed: list[tuple[str, str]] = []
    found = list(
        measure(cases, Inputs(torch.device("cuda", 0)), lambda case, error: failed.append((case.op, str(error))))
    )
    assert failed == [("broken", "does not launch")]
    assert [timings[0].op for timings in found] == ["product"]


@pytest.mark.gpu
def test_the_cache_is_warmed_by_other_processes() -> None:
    cases = all_cases()[0]
    # The linears have weights of their own, and one process warms both.
    chosen = select(
        cases, ["linear/in=5120,out=12288", "linear/in=6144"], {"rows": ["1"], "rate": ["3"], "codebook": ["mul1"]}
    )
    chosen += [case for case in cases if case.op == "rms-norm"][:2]
    assert len(chosen) == 4
    assert sorted(warm(chosen, 2)) == sorted((case.name, "") for case in chosen)
