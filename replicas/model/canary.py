"""The canary: a fixed prompt whose tokens and log-probabilities must be, at every start, what they were at the first load.

The record is keyed by weights, arithmetic and its own length, so other weights or another machine make one of their own; what it catches is the same
weights on the same arithmetic giving another answer. Knows a shard by its steps only.
"""

import hashlib
import json
import struct
from pathlib import Path
from typing import Protocol

from espalier.replicas.errors import CheckpointError
from espalier.replicas.model.fingerprint import write_atomically
from espalier.replicas.request import SamplingParams
from espalier.replicas.schedule.step import BlockAppend, Lane, SampledToken, SequenceBegin, Step, StepResult
from espalier.replicas.shard_info import ShardInfo
from espalier.replicas.token_hash import token_sha256

_SEQ_ID = -1
_PROMPT_TOKENS = 24
_NEW_TOKENS = 8
_LOGPROBS = 20


class StepRunner(Protocol):
    """What the canary needs of a Shard."""

    info: ShardInfo

    def execute(self, step: Step) -> StepResult: ...


def check_canary(shard: StepRunner, cache_dir: Path) -> str:
    """Runs the fixed prompt on an idle shard, compares with the record or makes it, and returns the tokens' sha256.

    Uses blocks 0, 1, ... of the cache; nothing may be live there. Raises CheckpointError when the answer changed.
    """
    info = shard.info
    # A context too short for all of it has a record of its own.
    num_tokens = min(_PROMPT_TOKENS + _NEW_TOKENS, info.max_context)
    tokens = _answer(shard, num_tokens)
    found = {"token_sha256": token_sha256([token.token_id for token in tokens]), "logprobs_sha256": _digest(tokens)}
    file = cache_dir.expanduser() / "records" / f"canary-{info.weights_id}-{info.numerics_id}-{num_tokens}.json"
    if not file.exists():
        write_atomically(file, json.dumps(found, indent=1))
        return found["token_sha256"]
    try:
        recorded = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{file}: record of the canary cannot be read; delete it to make a new one") from e
    if recorded != found:
        raise CheckpointError(
            f"{file}: the fixed prompt's answer is not that of the first load, though weights and arithmetic are the same. "
            "Something computes wrongly; if the change is meant, delete the file"
        )
    return found["token_sha256"]


def _answer(shard: StepRunner, num_tokens: int) -> list[SampledToken]:
    info = shard.info
    num_prompt = num_tokens - min(_NEW_TOKENS, num_tokens - 1)
    prompt = tuple((7919 * i + 11) % info.vocab_size for i in range(num_prompt))
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens - num_prompt, logprobs=_LOGPROBS, ignore_eos=True)
    blocks = tuple(range(-(-num_tokens // info.block_size)))
    begin, append = SequenceBegin(_SEQ_ID, params, num_prompt), BlockAppend(_SEQ_ID, blocks)
    # Step ids below 0 cannot meet the scheduler's.
    step = Step(-num_tokens, "canary", (Lane(_SEQ_ID, 0, prompt, 1),), begins=(begin,), appends=(append,))
    drawn: list[SampledToken] = []
    while True:
        result = shard.execute(step)
        if _SEQ_ID in result.failed:
            raise CheckpointError(f"the fixed prompt failed: {result.failed[_SEQ_ID]}")
        drawn += result.sampled[_SEQ_ID]
        if len(drawn) == num_tokens - num_prompt:
            break
        lane = Lane(_SEQ_ID, num_prompt + len(drawn) - 1, (drawn[-1].token_id,), 1)
        step = Step(step.step_id + 1, "canary", (lane,))
    shard.execute(Step(-1, "canary", (), ends=(_SEQ_ID,)))
    return drawn


def _digest(tokens: list[SampledToken]) -> str:
    digest = hashlib.sha256()
    for token in tokens:
        assert token.logprobs is not None
        for token_id, logprob in token.logprobs.top:
            digest.update(struct.pack("<Id", token_id, logprob))
    return digest.hexdigest()
