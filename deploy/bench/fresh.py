"""Resumed with cold: a reply whose prompt's beginning is restored from kept state has the tokens of one that computes it all.

Where calls may go past the prefix cache, state is kept first, by prompts and by replies, then tails of 1, 16 and 17 rows behind it run together,
along with a cold prompt; last, all of them run alone and cold. Elsewhere prompts that are new run cold, and then once more.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from espalier.deploy.bench.plan import Sampling, sampling_params
from espalier.deploy.bench.prompts import BenchPrompt, random_token_ids
from espalier.deploy.bench.results import Fresh
from espalier.deploy.bench.stats import StreamRecord, compare
from espalier.deploy.bench.target import BenchError, Call, Target, run_alone, run_together
from espalier.replicas.errors import InvalidRequestError

LONG_TOKENS = 8192
TAILS = (1, 16, 17)
_SHORT_BLOCKS = 4
_USUAL_BLOCK = 16


@dataclass(frozen=True, slots=True)
class FreshCase:
    """A prompt whose first kept_tokens (at least) must be restored when it resumes; 0: it runs cold, in company."""

    call: Call
    kept_tokens: int


def run_fresh(target: Target, side: str, sampling: Sampling, num_tokens: int, seed: int) -> list[Fresh]:
    """All cases of one target. Raises BenchError when what keeps the state fails, InvalidRequestError when the context is too short."""
    info = target.info
    assert info.vocab_size is not None, "an exact target tells its vocabulary"
    block = info.block_size or _USUAL_BLOCK
    lengths = kept_lengths(info.max_context, info.kv_tokens, block, num_tokens)
    rng = random.Random(f"fresh {seed} {sampling} {side}")
    maker = _Maker(info.vocab_size, sampling, num_tokens, rng)
    if info.can_skip_cache:
        cases = _resumable(target, maker, lengths, block)
        resumed = run_together(target, [case.call for case in cases])
        cold = run_alone(target, [replace(case.call, use_prefix_cache=False) for case in cases])
    else:
        cases = [maker.again(length + more) for length in lengths for more in (0, 1)]
        cold = run_alone(target, [case.call for case in cases])
        # Alone too: together, a router may find a replica too busy for its own session.
        resumed = run_alone(target, [case.call for case in cases])
    return [judge(side, sampling, case, one, two) for case, one, two in zip(cases, resumed, cold, strict=True)]


def kept_lengths(max_context: int | None, kv_tokens: int | None, block: int, num_tokens: int) -> tuple[int, ...]:
    """Tokens of the states that are kept, in whole blocks: a short one, and one of about 8k tokens, or of what there is room for.

    Both must still be kept when other prompts as long have run beside them.
    """
    room = LONG_TOKENS
    if max_context is not None:
        room = min(room, max_context - max(TAILS) - 2 * num_tokens)
    if kv_tokens is not None:
        room = min(room, kv_tokens // 4)
    short, long = _SHORT_BLOCKS * block, room // block * block
    if long < short:
        raise InvalidRequestError(
            f"--fresh: {short} tokens of kept state and two replies of {num_tokens} need more room than a context of {max_context} "
            f"and {kv_tokens} tokens of KV",
            param="fresh",
        )
    return (short, long) if long > short else (short,)


def judge(side: str, sampling: Sampling, case: FreshCase, resumed: StreamRecord, cold: StreamRecord) -> Fresh:
    """A case is equal only where it resumed as it should have and the cold run was cold."""
    where = f"{side}, resumed with cold, {sampling}"
    for record, name in ((resumed, "resumed"), (cold, "cold")):
        if record.error is not None:
            resumed = replace(resumed, error=f"{name}: {record.error}")
            break
    else:
        if cold.cached_tokens:
            resumed = replace(resumed, error=f"the cold run restored {cold.cached_tokens} tokens")
        elif resumed.cached_tokens < case.kept_tokens:
            resumed = replace(
                resumed, error=f"{resumed.cached_tokens} tokens were restored, {case.kept_tokens} were kept"
            )
    return Fresh(
        side=side,
        sampling=sampling,
        name=case.call.prompt.name,
        prompt_tokens=resumed.prompt_tokens,
        kept_tokens=resumed.cached_tokens,
        comparison=compare([resumed], {cold.prompt: cold}, where),
    )


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes calls of random tokens, which nothing kept by others begins with."""

    vocab_size: int
    sampling: Sampling
    num_tokens: int
    rng: random.Random

    def ids(self, count: int) -> tuple[int, ...]:
        return random_token_ids(count, self.vocab_size, self.rng)

    def call(self, name: str, token_ids: Sequence[int], session: str | None = None) -> Call:
        params = sampling_params(self.sampling, self.num_tokens, self.rng.randrange(2**20))
        return Call(prompt=BenchPrompt(name, "fresh", token_ids=tuple(token_ids)), params=params, session=session)

    def again(self, count: int) -> FreshCase:
        """A prompt to be sent twice, to one replica."""
        return FreshCase(self.call(f"again-{count}", self.ids(count), f"bench-{self.rng.getrandbits(64):x}"), 1)


def _resumable(target: Target, maker: _Maker, lengths: Sequence[int], block: int) -> list[FreshCase]:
    """Runs what keeps the states, and returns prompts that go on from there: from a prompt's end, and from a reply's."""
    states = [maker.ids(length) for length in lengths]
    kept = run_together(target, [maker.call(f"keep-{len(state)}", state) for state in states])
    cases: list[FreshCase] = []
    for state, record in zip(states, kept, strict=True):
        if record.error is not None:
            raise BenchError(f"a prompt of {len(state)} tokens fails: {record.error}")
        cases += [
            FreshCase(maker.call(f"tail-{tail}-past-{len(state)}", state + maker.ids(tail)), len(state))
            for tail in TAILS
        ]
        turn = state + record.token_ids
        # The state of a reply's last token is never computed.
        held = (len(turn) - 1) // block * block
        cases.append(FreshCase(maker.call(f"turn-past-{len(turn)}", turn + maker.ids(max(TAILS))), held))
    cold = maker.call(f"cold-{lengths[-1]}-in-company", maker.ids(lengths[-1]))
    return [*cases, FreshCase(replace(cold, use_prefix_cache=False), 0)]
