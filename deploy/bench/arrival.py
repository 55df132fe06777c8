"""A long prompt that arrives among decoding streams: how long they wait behind it, against the same streams left in peace."""

import random
from collections.abc import Sequence
from dataclasses import replace

from espalier.deploy.bench.plan import Sampling, sampling_params
from espalier.deploy.bench.prompts import SAFE_VOCAB, BenchPrompt, random_token_ids
from espalier.deploy.bench.results import Arrival
from espalier.deploy.bench.stats import StreamRecord, compare, gaps_between, percentile
from espalier.deploy.bench.target import Call, Target, run_together

# The pilot, one stream more, is done when the others have this share of their tokens: then all of them decode.
_PILOT_SHARE = 4


def time_arrival(
    target: Target, side: str, sampling: Sampling, calls: Sequence[Call], num_tokens: int, seed: int
) -> Arrival:
    """Runs the calls twice, the second time with a cold prompt of num_tokens that comes once all of them decode."""
    rng = random.Random(f"arrival {seed} {num_tokens} {len(calls)} {sampling}")
    token_ids = random_token_ids(num_tokens, target.info.vocab_size or SAFE_VOCAB, rng)
    long = Call(
        prompt=BenchPrompt(f"arrival-{num_tokens}", "arrival", token_ids=token_ids),
        params=sampling_params(sampling, 1, 0),
        use_prefix_cache=not target.info.can_skip_cache,
    )
    pilot = replace(calls[0], params=replace(calls[0].params, max_tokens=pilot_tokens(calls)))
    quiet = run_together(target, [*calls, pilot])
    futures = target.submit([*calls, pilot])
    futures[-1].result()
    [arrived] = run_together(target, [long])
    return judge(side, sampling, num_tokens, quiet, [future.result() for future in futures], arrived)


def pilot_tokens(calls: Sequence[Call]) -> int:
    """Tokens of the stream whose end tells that all others decode."""
    return max(1, min(call.params.max_tokens for call in calls) // _PILOT_SHARE)


def judge(
    side: str,
    sampling: Sampling,
    num_tokens: int,
    quiet: Sequence[StreamRecord],
    busy: Sequence[StreamRecord],
    arrived: StreamRecord,
) -> Arrival:
    """Gaps of both runs: of the quiet one from the pilot's end on, of the busy one while the long prompt was being computed.

    The pilot is the last record of either run. Replies of the two must be equal; a prompt that came too late, when a stream had ended, shows nothing.
    """
    streams, (start, end) = busy[:-1], (arrived.sent, arrived.ended)
    where = f"{side}, {sampling}, {num_tokens} tokens arriving at {len(streams)} streams"
    records = [*streams, *(record for record in quiet if record.error is not None)]
    if arrived.error is not None:
        records.append(arrived)
    elif any(record.error is None and record.ended < end for record in streams):
        records.append(replace(arrived, error="streams ended before it had its first token; give them more --tokens"))
    waits = [gap for record in streams for gap in gaps_between(record.arrivals, start, end)]
    calm = [gap for record in quiet[:-1] for gap in gaps_between(record.arrivals, quiet[-1].ended, float("inf"))]
    return Arrival(
        side=side,
        sampling=sampling,
        streams=len(streams),
        prompt_tokens=num_tokens,
        ttft_s=arrived.ttft_s,
        quiet_p50_s=percentile(calm, 0.5),
        quiet_p99_s=percentile(calm, 0.99),
        busy_p99_s=percentile(waits, 0.99),
        busy_most_s=max(waits, default=None),
        comparison=compare(records, {record.prompt: record for record in quiet[:-1]}, where),
    )
