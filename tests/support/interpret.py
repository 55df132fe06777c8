"""Tests of plain Triton kernels on the CPU: `@interpreted` runs a test's body in a process where Triton interprets.

Triton decides when it is imported whether it compiles or interprets, and other tests of the session compile. So one worker process with
TRITON_INTERPRET=1 is started for the session, on first use; a decorated test sends its own name and arguments there, and what it raises
comes back. The test's module is imported in both processes, so kernels may be imported at its top. Knows no kernel.

    @pytest.mark.parametrize("rows", [1, 3])
    @interpreted
    def test_rotation(rows: int) -> None:
        ...  # launch kernels on CPU tensors; the interpreter is slow: tiny shapes

Arguments and exceptions travel pickled; fixtures that cannot be pickled do not. Assertions come back without pytest's rewriting.
"""

import functools
import importlib
import importlib.util
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ParamSpec

import pytest
import torch

P = ParamSpec("P")
_VARIABLE = "TRITON_INTERPRET"


class InterpretedTestError(AssertionError):
    """Carries the worker's traceback as its message."""


def interpreted(test: Callable[P, None]) -> Callable[P, None]:
    """Run this test function where Triton interprets; skip it without Triton."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        if os.environ.get(_VARIABLE) == "1":
            test(*args, **kwargs)
            return
        if importlib.util.find_spec("triton") is None:
            pytest.skip("needs Triton")
        connection = _worker()
        try:
            connection.send((test.__module__, test.__qualname__, args, kwargs))
            failure = connection.recv()
        except BaseException:  # a time limit struck, or the worker died: its answer must not go to another test
            _worker.cache_clear()
            connection.close()
            raise
        if failure is not None:
            raise InterpretedTestError(failure)

    return run


@functools.cache
def _worker() -> Connection:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, list(sys.path)), daemon=True)
    os.environ[_VARIABLE] = "1"  # inherited by the child, read when it imports Triton
    try:
        process.start()
    finally:
        del os.environ[_VARIABLE]
    theirs.close()
    return ours


def _let_tensors_be_numbers() -> None:
    """Triton 3.6 takes int() of arrays with one element, for loop bounds; NumPy 2.4 refuses that unless they have no dimension."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend


def _serve(connection: Connection, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    _let_tensors_be_numbers()
    while True:
        try:
            module, name, args, kwargs = connection.recv()
        except EOFError:  # the session is over
            return
        try:
            torch.manual_seed(0)
            getattr(importlib.import_module(module), name)(*args, **kwargs)
            connection.send(None)
        except BaseException:  # assertions, and whatever a kernel raises: all of it is the test's result
            connection.send(traceback.format_exc())
