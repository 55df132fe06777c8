"""The span of a generate call at the gateway, by OpenTelemetry's conventions for generative AI where they have a name. Knows no OpenTelemetry."""

from espalier.cluster.call import GenerateCall
from espalier.cluster.live_call import CLIENT_LEFT, OK, LiveCall
from espalier.cluster.tracing import Span, Tracer, Value

# Larger numbers do not fit in an attribute.
_MAX_INTEGER = 2**63 - 1


def begin_call_span(tracer: Tracer, call: GenerateCall) -> Span:
    """A span for the call. Stop strings are a client's text, so they are not told."""
    params = call.params
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": call.operation,
        "gen_ai.provider.name": "espalier",
        "gen_ai.request.model": call.model,
        "gen_ai.request.choice.count": call.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.response.id": call.call_id,
        "gen_ai.response.model": call.model,
        "gen_ai.usage.input_tokens": len(call.prompt_token_ids),
        # A seed has 64 bits without a sign: text holds them all.
        "espalier.seed": str(params.seed),
        "espalier.client": call.client,
    }
    if params.seed <= _MAX_INTEGER:
        attributes["gen_ai.request.seed"] = params.seed
    return tracer.start(
        f"{call.operation} {call.model}", None if call.origin is None else call.origin.trace, attributes
    )


def end_call_span(span: Span, live: LiveCall) -> None:
    """The end of the call, however it came. Call it before the choices that a leaving client left behind are marked finished.

    Lists have one entry a choice, in order; of a choice that did not end they have none.
    """
    finishes = [choice.finish for choice in live.choices if choice.finish is not None]
    attributes: dict[str, Value] = {
        "gen_ai.response.finish_reasons": tuple(finish.reason.value for finish in finishes),
        "gen_ai.usage.output_tokens": sum(len(choice.emitted) for choice in live.choices),
        "gen_ai.usage.cache_read.input_tokens": finishes[0].usage.cached_tokens if finishes else 0,
        "espalier.replica.id": tuple(c.replica.replica_id for c in live.choices if c.replica is not None),
        "espalier.token_sha256": tuple(finish.token_sha256 for finish in finishes),
        "espalier.replays": live.replays,
        "espalier.outcome": live.outcome,
    }
    if (ttft_s := live.time_to_first_token_s) is not None:
        attributes["gen_ai.server.time_to_first_token"] = ttft_s
    span.end(attributes, error=None if live.outcome in (OK, CLIENT_LEFT) else live.outcome)
