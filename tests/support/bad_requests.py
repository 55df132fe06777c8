"""Values that a field of a generate request must be refused with, for every wire that can express them. Field names are SamplingParams' own."""

from typing import Any

# Of the right type, out of range: HTTP and gRPC both refuse these, naming the field.
OUT_OF_RANGE: tuple[tuple[str, Any], ...] = (
    ("temperature", -0.1),
    ("temperature", 100.5),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.01),
    ("top_k", 2**31),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 101.0),
    ("presence_penalty", 2.5),
    ("presence_penalty", -2.5),
    ("frequency_penalty", 3.0),
    ("frequency_penalty", -3.0),
    ("logit_bias", {7: 100.5}),
    ("logit_bias", {7: -101.0}),
    ("logit_bias", {100_000: 1.0}),
    ("max_tokens", 0),
    ("max_tokens", 1_000_000),
    ("min_tokens", 1_000_000),
    ("stop", [""]),
    ("stop", [str(i) for i in range(17)]),
    ("stop", ["x" * 1025]),
    ("stop_token_ids", [100_000]),
    ("stop_token_ids", [1] * 1025),
    ("n", 0),
    ("n", 17),
)
