"""Fills Triton's cache with the kernels of some cases, several processes at once, so that a timed run compiles nothing. Knows no op."""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from espalier.kernels.bench.registry import BenchCase, Inputs, all_cases

NEIGHBOURS = 3


def warm(cases: Sequence[BenchCase], num_processes: int) -> Iterator[tuple[str, str]]:
    """Runs each call of each case once, and yields (case, '' or why it failed) as they are done."""
    # Neighbours often need the same kernels; a few of them go to one process.
    names = [case.name for case in cases]
    parts = [names[first : first + NEIGHBOURS] for first in range(0, len(names), NEIGHBOURS)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_processes, len(parts)), mp_context=context) as pool:
        for done in as_completed([pool.submit(_run_once, part) for part in parts]):
            yield from done.result()


def _run_once(names: Sequence[str]) -> list[tuple[str, str]]:
    inputs = Inputs(torch.device("cuda", torch.cuda.current_device()))
    wanted = set(names)
    outcome = []
    for case in (case for case in all_cases()[0] if case.name in wanted):
        inputs.begin(case)
        try:
            for call in case.make(inputs).calls.values():
                call.run(0)
            torch.cuda.synchronize()
            outcome.append((case.name, ""))
        except Exception as error:  # reported by name; the others still warm up
            outcome.append((case.name, f"{type(error).__name__}: {error}"))
    return outcome
