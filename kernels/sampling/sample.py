"""Logits -> one token a row, all on the device: the launches of a sampled round, its scratch and its outputs.

Bit for bit `reference.py` in the order of work of a sampler: penalties, biases, bans, then the best token or temperature, top_k, top_p, min_p
and a keyed draw. Launches depend on shapes and on `Needs` alone, nothing is read back, nothing allocated: a call can be captured. A row's
result depends on its own logits, line, history and position. Knows no requests; `rows.py` makes the lines.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from espalier.kernels.counters import Scratch, ScratchSize
from espalier.kernels.sampling.choose import choose_kernel
from espalier.kernels.sampling.guess import guess_kernel
from espalier.kernels.sampling.logprobs import COLUMNS, FIRST_HALVINGS, LAST_HALVINGS, report_kernel, sum_kernel
from espalier.kernels.sampling.rows import MAX_TOP, Limits, Needs
from espalier.kernels.sampling.scores import score_kernel
from espalier.kernels.sampling.select import SPARE
from espalier.kernels.sampling.sift import SUMS, sift_kernel

GROUP = 64  # tokens whose best score is kept, for looking up leading tokens
_CHUNKS = (1024, 2048, 4096)  # tokens of a program
_ENOUGH_PROGRAMS = 256
_WARPS_OF_A_ROW = 8  # of programs that have a row to themselves
_SUM_WORDS = 2 * SUMS

_EVERY_NEED = Needs()


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a call writes, for rows whose lane is not negative; others keep what was there.

    token_ids: int32 [rows]; 0 for a failed row. status: int32 [rows], 0, or 1 when the scores have no finite maximum (NaN among them
    counts so). For rows that want log probabilities and did not fail: logprob fp32 [rows] of the token, and the best tokens in order,
    top_ids int32 and top_logprobs fp32 [rows, 20]; places beyond those asked for are -1 and -inf. A logprob of -inf is a token that cannot
    be drawn.
    """

    token_ids: Tensor
    status: Tensor
    logprob: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    @staticmethod
    def empty(rows: int, device: torch.device | str) -> "Drawn":
        """Outputs for up to so many rows."""
        return Drawn(
            token_ids=torch.empty(rows, dtype=torch.int32, device=device),
            status=torch.empty(rows, dtype=torch.int32, device=device),
            logprob=torch.empty(rows, dtype=torch.float32, device=device),
            top_ids=torch.empty(rows, MAX_TOP, dtype=torch.int32, device=device),
            top_logprobs=torch.empty(rows, MAX_TOP, dtype=torch.float32, device=device),
        )


def scratch_size(rows: int, limits: Limits) -> ScratchSize:
    """What `sample` needs for up to so many rows: about 12 bytes a row and token."""
    return ScratchSize(counters=rows * (_SUM_WORDS + 1), partials=sum(_parts(rows, limits.vocab)))


def sample(
    logits: Tensor,
    lanes: Tensor,
    positions: Tensor,
    table: Tensor,
    seen: Tensor,
    limits: Limits,
    out: Drawn,
    scratch: Scratch,
    needs: Needs = _EVERY_NEED,
    pending: Tensor | None = None,
) -> None:
    """Draws a token for each row of logits into `out`.

    logits: fp32, fp16 or bf16 [rows, vocab], left unchanged, rows contiguous. lanes: int32 [rows], a line of `table` and of `seen` each; a
    negative lane is padding. positions: int32 or int64 [rows], absolute, of the tokens being drawn. table: int32 [lanes, limits.width] of
    `pack_rows`. seen: int32 [lanes, vocab] of `history.py`; read for rows with penalties. needs: passes that some row of these lanes wants.
    pending: int32 [rows, n], tokens of a row's reply that are not yet in `seen` (drafts before it), filled up with -1.
    """
    rows, vocab = logits.shape
    _check(logits, lanes, positions, table, seen, limits, pending)
    if rows == 0:
        return
    scratch.require(scratch_size(rows, limits))
    work = _carve(scratch, rows, vocab)
    chunk = _chunk(rows, vocab)
    warps = max(4, chunk // 512)
    num_chunks, num_groups = triton.cdiv(vocab, chunk), triton.cdiv(vocab, GROUP)
    chunks, groups = triton.next_power_of_2(num_chunks), triton.next_power_of_2(num_groups)
    width, width_of_scores, over_chunks = table.shape[1], work.scores.shape[1], (num_chunks, rows)
    given = (logits, logits.stride(0), lanes)
    score_kernel[over_chunks](
        *given,
        positions,
        table,
        width,
        limits.max_biases,
        seen,
        lanes if pending is None else pending,
        0 if pending is None else pending.shape[1],
        work.scores,
        width_of_scores,
        work.group_best,
        num_groups,
        work.chunk_best,
        num_chunks,
        vocab,
        CHUNK=chunk,
        GROUP=GROUP,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    if needs.guesses:
        guess_kernel[(rows,)](
            *given,
            table,
            width,
            work.scores,
            width_of_scores,
            work.group_best,
            num_groups,
            work.chosen_groups,
            work.chunk_best,
            num_chunks,
            work.keys,
            width_of_scores,
            work.ends,
            vocab,
            GROUP=GROUP,
            GROUPS=groups,
            CHUNKS=chunks,
            num_warps=_WARPS_OF_A_ROW,
            enable_fp_fusion=False,
        )
    if needs.sifts:
        sift_kernel[over_chunks](
            *given,
            positions,
            table,
            width,
            work.scores,
            width_of_scores,
            work.chunk_best,
            num_chunks,
            work.ends,
            work.sums,
            work.chunk_token,
            work.chunk_rival,
            work.keys,
            width_of_scores,
            work.num_keys,
            vocab,
            CHUNK=chunk,
            CHUNKS=chunks,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    choose_kernel[(rows,)](
        *given,
        positions,
        table,
        width,
        work.scores,
        width_of_scores,
        work.group_best,
        num_groups,
        work.chosen_groups,
        work.chunk_best,
        num_chunks,
        work.ends,
        work.sums,
        work.chunk_token,
        work.chunk_rival,
        work.keys,
        width_of_scores,
        work.num_keys,
        work.spare,
        out.token_ids,
        out.status,
        vocab,
        CHUNK=chunk,
        CHUNKS=chunks,
        GROUP=GROUP,
        GROUPS=groups,
        SPARE=SPARE,
        num_warps=_WARPS_OF_A_ROW,
        enable_fp_fusion=False,
    )
    if needs.logprobs:
        num_columns = triton.cdiv(vocab, 1 << FIRST_HALVINGS)
        sum_kernel[(triton.cdiv(num_columns, COLUMNS), rows)](
            *given,
            table,
            width,
            work.scores,
            width_of_scores,
            work.chunk_best,
            num_chunks,
            work.column_sums,
            num_columns,
            vocab,
            CHUNKS=chunks,
            COLUMNS=COLUMNS,
            HALVINGS=FIRST_HALVINGS,
            num_warps=4,
            enable_fp_fusion=False,
        )
        report_kernel[(rows,)](
            *given,
            table,
            width,
            work.scores,
            width_of_scores,
            work.group_best,
            num_groups,
            work.chosen_groups,
            work.chunk_best,
            num_chunks,
            work.column_sums,
            num_columns,
            work.keys,
            width_of_scores,
            work.spare,
            out.token_ids,
            out.logprob,
            out.top_ids,
            out.top_logprobs,
            out.top_ids.shape[1],
            vocab,
            GROUP=GROUP,
            GROUPS=groups,
            CHUNKS=chunks,
            HALVINGS=LAST_HALVINGS,
            SPARE=SPARE,
            num_warps=_WARPS_OF_A_ROW,
            enable_fp_fusion=False,
        )


def _check(
    logits: Tensor,
    lanes: Tensor,
    positions: Tensor,
    table: Tensor,
    seen: Tensor,
    limits: Limits,
    pending: Tensor | None,
) -> None:
    rows, vocab = logits.shape
    if vocab != limits.vocab:
        raise ValueError(f"logits: {vocab} tokens, the table is for {limits.vocab}")
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16) or (vocab > 1 and logits.stride(1) != 1):
        raise ValueError("logits: must be fp32, fp16 or bf16 with contiguous rows")
    if lanes.shape != (rows,) or lanes.dtype != torch.int32 or not lanes.is_contiguous():
        raise ValueError("lanes: must be int32 [rows], contiguous")
    if positions.shape != (rows,) or positions.is_floating_point() or not positions.is_contiguous():
        raise ValueError("positions: must be integers [rows], contiguous")
    if table.dtype != torch.int32 or table.shape[1:] != (limits.width,) or not table.is_contiguous():
        raise ValueError("table: must be int32 [lanes, limits.width], contiguous")
    if seen.dtype != torch.int32 or seen.shape[1:] != (vocab,) or not seen.is_contiguous():
        raise ValueError("seen: must be int32 [lanes, vocab], contiguous")
    if pending is not None and (
        not pending.is_contiguous() or pending.dtype != torch.int32 or pending.shape[:-1] != (rows,)
    ):
        raise ValueError("pending: must be int32 [rows, n], contiguous")


class _Work(NamedTuple):
    """Scratch as tensors. scores, keys: [rows, vocab rounded up to 128]; the rest as the kernels say."""

    scores: Tensor
    keys: Tensor
    group_best: Tensor
    chosen_groups: Tensor
    chunk_best: Tensor
    chunk_token: Tensor
    chunk_rival: Tensor
    ends: Tensor
    column_sums: Tensor
    spare: Tensor
    sums: Tensor
    num_keys: Tensor


def _chunk(rows: int, vocab: int) -> int:
    """Tokens of a program: many where that still leaves enough programs. No result depends on it."""
    return next((c for c in reversed(_CHUNKS) if rows * triton.cdiv(vocab, c) >= _ENOUGH_PROGRAMS), _CHUNKS[0])


def _parts(rows: int, vocab: int) -> list[int]:
    """fp32 elements of the partials' parts, in the order of `_Work`; each a multiple of 4."""
    of_chunks = triton.cdiv(vocab, _CHUNKS[0])
    of_groups = triton.cdiv(vocab, GROUP)
    of_columns = triton.cdiv(vocab, 1 << FIRST_HALVINGS)
    wide = of_groups * GROUP
    words = (wide, 2 * wide, of_groups, of_groups, of_chunks, of_chunks, of_chunks, 2, of_columns, 2 * SPARE)
    return [triton.cdiv(rows * n, 4) * 4 for n in words]


def _carve(scratch: Scratch, rows: int, vocab: int) -> _Work:
    sizes = _parts(rows, vocab)
    scores, keys, group_best, chosen, chunk_best, token, rival, ends, column_sums, spare = scratch.partials[
        : sum(sizes)
    ].split(sizes)  # type: ignore[no-untyped-call]
    return _Work(
        scores=scores.view(rows, -1),
        keys=keys.view(torch.int64),
        group_best=group_best,
        chosen_groups=chosen.view(torch.int32),
        chunk_best=chunk_best,
        chunk_token=token.view(torch.int32),
        chunk_rival=rival,
        ends=ends,
        column_sums=column_sums,
        spare=spare.view(torch.int64),
        sums=scratch.counters[: rows * _SUM_WORDS].view(torch.int64),
        num_keys=scratch.counters[rows * _SUM_WORDS :],
    )
