"""`espalier encode`: source -> EXL3 checkpoint, over several threads, going on where a killed run stopped.

Work lies beside the output in OUTPUT.partial, one file for each linear done; the finished folder appears under its name at once.
"""

import contextlib
import hashlib
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor
from tqdm import tqdm

from espalier.deploy.encode.lock import held
from espalier.deploy.encode.recipe import PLAIN_HEAD_BITS, RECIPE_FILE, Recipe, make_recipe
from espalier.deploy.encode.source import Source, open_source
from espalier.deploy.encode.writer import linear_tensors, write_checkpoint, write_tensors
from espalier.kernels.exl3.codebook import Codebook
from espalier.kernels.exl3.encode import encode_linear, relative_error
from espalier.kernels.exl3.layout import BLOCK, TILE_WEIGHTS
from espalier.replicas.errors import CheckpointError, InvalidRequestError
from espalier.replicas.model.families import LinearSpec


def encode_checkpoint(
    source: Path,
    output: Path,
    *,
    bits: float,
    head_bits: float,
    codebook: str = "mul1",
    threads: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> None:
    """Encode a Hugging Face folder or a GGUF file into the new folder `output`.

    bits, head_bits: rates of the layers and of the head; 16 leaves the head plain. threads: None takes all cores.
    Returns at once when `output` holds just this already. Raises InvalidRequestError naming the option, CheckpointError naming the
    file and the tensor or key of the source.
    """
    recipe = make_recipe(source, bits=bits, head_bits=head_bits, codebook=codebook, seed=seed)
    if threads is not None and threads < 1:
        raise InvalidRequestError(f"threads: must be at least 1, is {threads}", param="threads")
    if recipe.is_of(output):
        return
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InvalidRequestError(
            f"output: {output} exists and holds something else; name a new folder", param="output"
        )
    work = output.with_name(output.name + ".partial")
    work.mkdir(parents=True, exist_ok=True)
    try:
        with held(work, wait=False):
            _encode_into(output, work, source, recipe, threads or len(os.sched_getaffinity(0)), progress)
    except BlockingIOError:
        raise InvalidRequestError(f"output: another run is at work in {work}", param="output") from None


def _encode_into(output: Path, work: Path, source: Path, recipe: Recipe, threads: int, progress: bool) -> None:
    if (work / RECIPE_FILE).exists() and not recipe.is_of(work):
        raise InvalidRequestError(
            f"output: {work} holds a run with other options or another source; remove it to start afresh",
            param="output",
        )
    recipe.write(work)
    opened = open_source(source, work / "files")
    linear_files = _encode_linears(opened, recipe, work / "linears", threads, progress)
    finished = work / "checkpoint"
    shutil.rmtree(finished, ignore_errors=True)
    finished.mkdir()
    write_checkpoint(finished, opened, recipe, linear_files)
    finished.replace(output)
    shutil.rmtree(work)


def _encode_linears(source: Source, recipe: Recipe, folder: Path, threads: int, progress: bool) -> dict[str, Path]:
    """Encode every linear that has no file in `folder` yet, the largest first. Returns each linear's file."""
    folder.mkdir(exist_ok=True)
    linears = [linear for layer in source.spec.layers for linear in layer.linears]
    if recipe.head_bits != PLAIN_HEAD_BITS:
        linears.append(source.spec.head)
    files = {linear.key: folder / f"{linear.key}.safetensors" for linear in linears}
    missing = sorted((linear for linear in linears if not files[linear.key].exists()), key=_num_weights, reverse=True)
    with (
        _Progress(sum(map(_num_weights, linears)), sum(map(_num_weights, missing)), progress) as bar,
        _one_torch_thread(),
        ThreadPoolExecutor(threads) as pool,
    ):

        def encode(linear: LinearSpec) -> None:
            rate = recipe.head_bits if linear is source.spec.head else recipe.bits
            write_tensors(files[linear.key], _encode(source, linear, rate, recipe, bar))

        futures = [pool.submit(encode, linear) for linear in missing]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            bar.stop()
            pool.shutdown(cancel_futures=True)
            raise
    return files


def _encode(source: Source, linear: LinearSpec, rate: float, recipe: Recipe, bar: "_Progress") -> dict[str, Tensor]:
    tied = linear is source.spec.head and source.head_is_tied
    name = source.spec.embedding if tied else f"{linear.key}.weight"
    weight = torch.zeros(_padded(linear.in_features), _padded(linear.out_features))
    weight[: linear.in_features, : linear.out_features] = source.read(name).T
    if not bool(weight.isfinite().all()):
        raise CheckpointError(f"{name}: holds values that are not finite")
    digest = hashlib.sha256(f"{recipe.seed}:{linear.key}".encode()).digest()
    encoded = encode_linear(weight, rate, Codebook(recipe.codebook), int.from_bytes(digest[:7]), bar.add_tiles)
    bar.show_error(relative_error(weight, encoded))
    has_bias = source.has(f"{linear.key}.bias")
    return linear_tensors(linear.key, encoded, source.read(f"{linear.key}.bias") if has_bias else None)


def _padded(width: int) -> int:
    return -(-width // BLOCK) * BLOCK


def _num_weights(linear: LinearSpec) -> int:
    return _padded(linear.in_features) * _padded(linear.out_features)


@contextlib.contextmanager
def _one_torch_thread() -> Iterator[None]:
    """The linears run beside each other, so each of them takes one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Progress:
    """A bar over all weights, told by several threads; once stopped, it ends whoever tells it more."""

    def __init__(self, total: int, missing: int, shown: bool) -> None:
        self._bar = tqdm(
            total=total,
            initial=total - missing,
            desc="encoding",
            unit=" weights",
            unit_scale=True,
            mininterval=0.5 if sys.stderr.isatty() else 10.0,
            disable=not shown,
        )
        self._lock = threading.Lock()
        self._stopped = False
        self._errors: list[float] = []

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()

    def stop(self) -> None:
        self._stopped = True

    def add_tiles(self, num_tiles: int) -> None:
        if self._stopped:
            raise CancelledError
        with self._lock:
            self._bar.update(num_tiles * TILE_WEIGHTS)

    def show_error(self, error: float) -> None:
        """The mean relative error of the linears so far."""
        with self._lock:
            self._errors.append(error)
            self._bar.set_postfix_str(f"error {sum(self._errors) / len(self._errors):.4f}", refresh=False)
