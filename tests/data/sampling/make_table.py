"""The golden table of sampling: cases given by integer formulas, and the bits that every device must give for them.

    python tests/data/sampling/make_table.py

writes table.json anew from the reference. It may only change together with the definition of the arithmetic, which changes every seeded reply.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from espalier.kernels.sampling import reference
from espalier.replicas.request import SamplingParams
from espalier.replicas.sampling.sampler import SampleRow, TokenHistory, sample_row
from espalier.replicas.sampling.seeds import choice_seed, row_key

TABLE = Path(__file__).with_name("table.json")

NOISE_KEYS = (0, 1, 0xFFFFFFFF, 0x0123456789ABCDEF, 2**64 - 1)
NOISE_IDS = (0, 1, 2, 3, 255, 4095, 49151, 151935, 2**24 + 1, 2**31 - 1)
CHOICE_SEEDS = ((0, 0), (0, 1), (0, 2), (1, 1), (2**64 - 1, 1), (2**64 - 1, 127))

_PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.2}
_PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3, **_PENALTIES},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 1},
    {"temperature": 1.5, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "logprobs": 5, **_PENALTIES},
    {"temperature": 2.0, "logit_bias": [[0, 7.25], [3, -100.0]], "logprobs": 20},
)
_SHAPES = (
    # vocab, steps a unit (powers of two; few steps make ties), spread: the largest logit
    {"vocab": 7, "steps": 4, "spread": 4},
    {"vocab": 1000, "steps": 2, "spread": 8},
    {"vocab": 49152, "steps": 16384, "spread": 16},
    {"vocab": 151936, "steps": 8, "spread": 8},
)


def cases() -> list[dict[str, Any]]:
    """Inputs of all cases: plain data, as the table holds it."""
    found = []
    for shape in _SHAPES:
        for params in _PARAMS:
            number = len(found)
            found.append(
                {
                    **shape,
                    "salt": number,
                    "position": 5 + number * 977,
                    "params": {**params, "seed": number * 0x9E3779B97F4A7C15 % 2**64},
                    "banned": [1] if number % 4 == 3 else [],
                }
            )
    return found


def logits_of(case: dict[str, Any], device: str) -> Tensor:
    """Logit of token i: with x = (i * 2654435761 + salt * 40503) mod 2^32 and y = x XOR (x >> 15), it is
    (y mod (2 * spread * steps) - spread * steps) / steps. All of it is exact in fp32."""
    x = (torch.arange(case["vocab"], device=device) * 2654435761 + case["salt"] * 40503) % 2**32
    y = x ^ (x >> 15)
    half = case["spread"] * case["steps"]
    return (y % (2 * half) - half).to(torch.float32) / case["steps"]


def history_of(case: dict[str, Any], device: str) -> TokenHistory:
    """Token at position j is (j * j * 31 + salt) mod vocab; the first half, rounded up, is the prompt."""
    history = TokenHistory(case["vocab"], device)
    tokens = [(j * j * 31 + case["salt"]) % case["vocab"] for j in range(case["position"])]
    history.observe(0, tokens, (case["position"] + 1) // 2)
    return history


def result_of(case: dict[str, Any], device: str) -> dict[str, Any]:
    """What the reference makes of a case."""
    fields = dict(case["params"])
    fields["logit_bias"] = tuple((token_id, bias) for token_id, bias in fields.get("logit_bias", ()))
    params = SamplingParams(**fields)
    row = SampleRow(params, case["position"], history_of(case, device), tuple(case["banned"]))
    sampled = sample_row(logits_of(case, device), row)
    result: dict[str, Any] = {"token_id": sampled.token_id}
    if sampled.logprobs is not None:
        result["logprob"] = _bits(sampled.logprobs.logprob)
        result["top"] = [[token_id, _bits(logprob)] for token_id, logprob in sampled.logprobs.top]
    return result


def noise_of(key: int, device: str) -> list[str]:
    """Bits of the noise of NOISE_IDS under that key."""
    return [_bits(x) for x in reference.gumbel(key, torch.tensor(NOISE_IDS, device=device)).tolist()]


def _bits(x: float) -> str:
    """The fp32 number's 32 bits in hex."""
    return f"{int(torch.tensor(x, dtype=torch.float32).view(torch.int32)) & 0xFFFFFFFF:08x}"


def table() -> dict[str, Any]:
    """Everything table.json holds."""
    return {
        "row_keys": [
            [seed, position, f"{row_key(seed, position):016x}"] for seed in (0, 2**64 - 1) for position in (0, 1, 10**6)
        ],
        "choice_seeds": [[seed, index, f"{choice_seed(seed, index):016x}"] for seed, index in CHOICE_SEEDS],
        "noise_ids": list(NOISE_IDS),
        "noise": {f"{key:016x}": noise_of(key, "cpu") for key in NOISE_KEYS},
        "cases": [{**case, "result": result_of(case, "cpu")} for case in cases()],
    }


def _write() -> None:
    content = table()
    lines = [f'  "{name}": {json.dumps(value)},' for name, value in content.items() if name != "cases"]
    rows = ",\n".join(f"    {json.dumps(case)}" for case in content["cases"])
    TABLE.write_text("\n".join(["{", *lines, '  "cases": [', rows, "  ]", "}", ""]))


if __name__ == "__main__":
    _write()
