"""Exact top-k and top-p over a list of rank keys, and the list itself for few leading tokens, in Triton: device functions of one program.

A list holds rank keys (`order.py`) in any order. A filter keeps a prefix in order, so all that it decides is the last key kept. Lists are
in global memory that one program writes and reads, with a barrier between. Know no rows.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: N803

import triton
import triton.language as tl

from espalier.kernels.sampling.lines import load_scores
from espalier.kernels.sampling.order import rank_key, rank_word, scale, share_of, value_of, weight

_INF = tl.constexpr(float("inf"))
_LAST_WORD = tl.constexpr(2**31 - 1)  # above the rank word of every number
_LAST_KEY = tl.constexpr(2**63 - 1)
RANKED = tl.constexpr(128)  # lists up to this long are ranked by comparing all with all
_RANK_STEP = tl.constexpr(32)
SPARE = 4096  # keys that fit into a program's registers
_BLOCK = tl.constexpr(SPARE)
_SLACK = tl.constexpr(8)
_AROUND = tl.constexpr(0.06)
_MANY_GROUPS = tl.constexpr(2048)


@triton.jit
def gather_leading(
    logits,
    scores,
    edited,
    vocab,
    group_best,
    num_groups,
    best,
    temperature,
    count,
    chosen_groups,
    keys,
    SCALED: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Lists at least the first `count` tokens of a row in order; returns the list's length, count to vocab, and the last rank word in it.

    A number that `count` groups' best scores reach is a bound: as many tokens at least reach it. Only groups that reach it are read.
    SCALED: in order of scaled scores, else of the scores themselves. chosen_groups: int32 scratch [num_groups].
    """
    group = tl.arange(0, GROUPS)
    tops = tl.load(group_best + group, mask=group < num_groups, other=-_INF)
    if SCALED:
        tops = scale(tops, best, temperature)
    words = tl.where(group < num_groups, rank_word(tops), _LAST_WORD)
    few_words = words
    if GROUPS >= _MANY_GROUPS:
        # The best of four groups is a bound for as many tokens, and there are fewer of them to look through.
        few_words = tl.min(tl.reshape(words, (GROUPS // 4, 4)), axis=1)
    bound = _bound(few_words, count)
    chosen = (group < num_groups) & (words <= bound)
    tl.store(chosen_groups + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, group, mask=chosen)
    num_chosen = tl.sum(chosen.to(tl.int32), axis=0)
    tl.debug_barrier()
    length = 0
    for start in range(0, num_chosen, _BLOCK // GROUP):
        i = start + tl.arange(0, _BLOCK // GROUP)
        first = tl.load(chosen_groups + i, mask=i < num_chosen, other=0) * GROUP
        token_ids = tl.reshape(first[:, None] + tl.arange(0, GROUP)[None, :], (_BLOCK,))
        wanted = (i < num_chosen)[:, None] & (tl.arange(0, GROUP)[None, :] < GROUP)
        inside = tl.reshape(wanted, (_BLOCK,)) & (token_ids < vocab)
        x = load_scores(logits, scores, edited, token_ids, inside)
        if SCALED:
            x = scale(x, best, temperature)
        ranked = rank_word(x)
        listed = inside & (ranked <= bound)
        places = length + tl.cumsum(listed.to(tl.int32), axis=0) - 1
        tl.store(keys + places, rank_key(ranked, token_ids), mask=listed)
        length += tl.sum(listed.to(tl.int32), axis=0)
    tl.debug_barrier()
    return length, bound


@triton.jit
def list_all(logits, scores, edited, vocab, best, temperature, keys):
    """Lists all tokens of a row in order of scaled scores; returns how many."""
    for start in range(0, vocab, _BLOCK):
        token_ids = start + tl.arange(0, _BLOCK)
        x = load_scores(logits, scores, edited, token_ids, token_ids < vocab)
        key = rank_key(rank_word(scale(x, best, temperature)), token_ids)
        tl.store(keys + token_ids, key, mask=token_ids < vocab)
    tl.debug_barrier()
    return vocab


@triton.jit
def prefix_end(keys, length, count, share, weight_before, total, spare):
    """The last rank key that top_k and then top_p keep of a list of scaled scores; the list holds the last key of either.

    count: how many of the list top_k leaves, at least 1; any larger number than length when it is off. share: of top_p in 2^-30, 0: off.
    weight_before: int64, weight of tokens before all of the list. total: int64, weight of all that top_k kept, or -1 if that is
    weight_before and what is kept of the list. spare: int64 scratch [SPARE].
    """
    if length <= RANKED:
        end = _end_by_rank(keys, length, count, share, weight_before, total)
    else:
        end = tl.full((), _LAST_KEY, tl.int64)
        if count < length:
            end = _end_by_halving(keys, length, end, count.to(tl.int64), spare, False)
        if share > 0:
            if total < 0:
                _, weight_in_list = _sums_to(keys, length, end, True)
                total = weight_before + weight_in_list
            end = _end_by_halving(keys, length, end, share_of(share, total) - weight_before, spare, True)
    return end


@triton.jit
def shorten(keys, length, count, spare):
    """Leaves the first `count` in order, or all when there are fewer, at the list's beginning; returns how many.

    Places are at or before those read in the same step or earlier, so the list is rewritten in place.
    """
    if count < length:
        end = _end_by_halving(keys, length, tl.full((), _LAST_KEY, tl.int64), count.to(tl.int64), spare, False)
        length = _copy_between(keys, length, tl.full((), -_LAST_KEY, tl.int64), end, keys)
    return length


@triton.jit
def _bound(words, count):
    """A number that at least `count` of these rank words do not exceed, and few more; the last word when there are fewer than `count`."""
    low = tl.min(words, axis=0).to(tl.int64)
    high = tl.full((), _LAST_WORD, tl.int64)
    while low < high:
        middle = (low + high) >> 1
        reached = tl.sum((words <= middle).to(tl.int32), axis=0)
        high = tl.where(reached >= count, middle, high)
        low = tl.where(reached >= count, low, middle + 1)
        low = tl.where((reached >= count) & (reached <= count + _SLACK), high, low)
    return high


@triton.jit
def rank_all(keys, length):
    """(keys, ranks, weights before each) of a list of at most RANKED keys of scaled scores, each compared with all: [RANKED], in list order."""
    i = tl.arange(0, RANKED)
    key = tl.load(keys + i, mask=i < length, other=_LAST_KEY)
    rank = tl.zeros((RANKED,), tl.int32)
    before = tl.zeros((RANKED,), tl.int64)
    for start in range(0, length, _RANK_STEP):
        j = start + tl.arange(0, _RANK_STEP)
        other = tl.load(keys + j, mask=j < length, other=_LAST_KEY)
        earlier = other[None, :] < key[:, None]
        rank += tl.sum(earlier.to(tl.int32), axis=1)
        before += tl.sum(tl.where(earlier, weight(value_of(other)).to(tl.int64)[None, :], 0), axis=1)
    return key, rank, before


@triton.jit
def _end_by_rank(keys, length, count, share, weight_before, total):
    """`prefix_end` of a short list."""
    key, rank, before = rank_all(keys, length)
    kept = (tl.arange(0, RANKED) < length) & (rank < count)
    if share > 0:
        if total < 0:
            total = weight_before + tl.sum(tl.where(kept, weight(value_of(key)).to(tl.int64), 0), axis=0)
        kept = kept & (weight_before + before < share_of(share, total))
    return tl.max(tl.where(kept, key, -_LAST_KEY), axis=0)


@triton.jit
def _end_by_halving(keys, length, limit, target, spare, BY_WEIGHT: tl.constexpr):
    """The first key up to which tokens count (or weigh) at least `target`, which those up to `limit` do. Halves the range of keys."""
    if length > _BLOCK:
        keys, length, target = _narrow(keys, length, limit, target, spare, BY_WEIGHT)
    i = tl.arange(0, _BLOCK)
    key = tl.load(keys + i, mask=i < length, other=_LAST_KEY)
    listed = (i < length) & (key <= limit)
    key = tl.where(listed, key, _LAST_KEY)
    amount = listed.to(tl.int64)
    if BY_WEIGHT:
        amount = tl.where(listed, weight(value_of(key)).to(tl.int64), 0)
    low = tl.min(key, axis=0)
    high = tl.max(tl.where(listed, key, -_LAST_KEY), axis=0)
    count_below = 0
    count = tl.sum(listed.to(tl.int32), axis=0)
    # The end lies in low .. high, which holds count - count_below keys.
    while count - count_below > 1:
        middle = _middle(low, high)
        reached = tl.sum(tl.where(key <= middle, amount, 0), axis=0) >= target
        count_to_middle = tl.sum((key <= middle).to(tl.int32), axis=0)
        high = tl.where(reached, middle, high)
        count = tl.where(reached, count_to_middle, count)
        low = tl.where(reached, low, middle + 1)
        count_below = tl.where(reached, count_below, count_to_middle)
    return tl.max(tl.where(key <= high, key, -_LAST_KEY), axis=0)


@triton.jit
def _narrow(keys, length, limit, target, spare, BY_WEIGHT: tl.constexpr):
    """(keys, length, target) of a list of at most SPARE keys, in spare, that holds the end which `_end_by_halving` seeks in a longer one.

    Two keys around the place where the end would be if amounts rose evenly shorten the range at a time, or, where that fails, its quarters.
    """
    lows = tl.full((_BLOCK,), _LAST_KEY, tl.int64)
    highs = tl.full((_BLOCK,), -_LAST_KEY, tl.int64)
    for start in range(0, length, _BLOCK):
        i = start + tl.arange(0, _BLOCK)
        key = tl.load(keys + i, mask=i < length, other=_LAST_KEY)
        lows = tl.minimum(lows, key)
        highs = tl.where((i < length) & (key <= limit), tl.maximum(highs, key), highs)
    low, high = tl.min(lows, axis=0), tl.max(highs, axis=0)
    count_below, amount_below = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    count, amount = _sums_to(keys, length, high, BY_WEIGHT)
    passes = 0
    while count - count_below > _BLOCK:
        part = (target - amount_below).to(tl.float32) / (amount - amount_below).to(tl.float32)
        even = passes % 2 == 0
        first = tl.where(even, tl.maximum(part - _AROUND, 0.0), 0.25)
        second = tl.where(even, tl.minimum(part + _AROUND, 1.0), 0.75)
        passes += 1
        span = (high >> 1) - (low >> 1)
        for i in range(2):
            middle = low + (span.to(tl.float32) * tl.where(i == 0, second, first)).to(tl.int64) * 2
            middle = tl.maximum(tl.minimum(middle, high - 1), low)
            count_to_middle, amount_to_middle = _sums_to(keys, length, middle, BY_WEIGHT)
            reached = amount_to_middle >= target
            high = tl.where(reached, middle, high)
            count = tl.where(reached, count_to_middle, count)
            amount = tl.where(reached, amount_to_middle, amount)
            low = tl.where(reached, low, middle + 1)
            count_below = tl.where(reached, count_below, count_to_middle)
            amount_below = tl.where(reached, amount_below, amount_to_middle)
    return spare, _copy_between(keys, length, low, high, spare), target - amount_below


@triton.jit
def _copy_between(keys, length, low, high, out):
    """Copies the keys from low to high to `out`, which may be the list itself; returns how many. All threads see them after it."""
    copied = 0
    for start in range(0, length, _BLOCK):
        i = start + tl.arange(0, _BLOCK)
        key = tl.load(keys + i, mask=i < length, other=_LAST_KEY)
        wanted = (i < length) & (key >= low) & (key <= high)
        tl.debug_barrier()
        tl.store(out + copied + tl.cumsum(wanted.to(tl.int32), axis=0) - 1, key, mask=wanted)
        copied += tl.sum(wanted.to(tl.int32), axis=0)
    tl.debug_barrier()
    return copied


@triton.jit
def _sums_to(keys, length, last, BY_WEIGHT: tl.constexpr):
    """(number, amount) of the keys up to `last`, int64; amount is their weight or their number."""
    counts = tl.zeros((_BLOCK,), tl.int32)
    amounts = tl.zeros((_BLOCK,), tl.int64)
    for start in range(0, length, _BLOCK):
        i = start + tl.arange(0, _BLOCK)
        key = tl.load(keys + i, mask=i < length, other=_LAST_KEY)
        wanted = (i < length) & (key <= last)
        counts += wanted.to(tl.int32)
        if BY_WEIGHT:
            amounts += tl.where(wanted, weight(value_of(key)).to(tl.int64), 0)
    count = tl.sum(counts, axis=0).to(tl.int64)
    amount = count
    if BY_WEIGHT:
        amount = tl.sum(amounts, axis=0)
    return count, amount


@triton.jit
def _middle(low, high):
    """Half way, rounded down; a sum could overflow."""
    return (low >> 1) + (high >> 1) + (low & high & 1)
