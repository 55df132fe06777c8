"""One streamed chat request as a client sees it, with the time at which each message came. Over aiohttp, which `ray[serve]` brings.

The client trusts nothing: it hashes the token ids that it received and holds the hash against the one reported.
"""

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from espalier.deploy.bench.prompts import BenchPrompt
from espalier.deploy.bench.stats import StreamRecord
from espalier.replicas.token_hash import token_sha256

SEEDED = {"temperature": 0.8, "top_p": 0.95, "seed": 20_011}
GREEDY = {"temperature": 0.0}


class StreamError(Exception):
    """The stream did not end as it should have; the message says how."""


def chat_body(model: str, prompt: BenchPrompt, num_tokens: int, *, seeded: bool) -> dict[str, Any]:
    """The request: exactly num_tokens tokens, streamed, with usage and token ids."""
    return {
        "model": model,
        "messages": list(prompt.messages),
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **(SEEDED if seeded else GREEDY),
    }


async def stream_chat(
    session: aiohttp.ClientSession, url: str, prompt: BenchPrompt, body: dict[str, Any]
) -> StreamRecord:
    """Sends one request to the cluster at `url` and reads its stream to the end. Failures end up in the record, not in exceptions."""
    sent = time.perf_counter()
    arrivals: list[tuple[float, int]] = []
    token_ids: list[int] = []
    reported: str | None = None
    usage: dict[str, Any] = {}
    error: str | None = None
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise StreamError(f"status {response.status}: {(await response.text())[:300]}")
            async for chunk in sse_chunks(response.content):
                if "error" in chunk:
                    raise StreamError(f"error event: {chunk['error'].get('message')}")
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", ()):
                    if ids := choice.get("token_ids"):
                        arrivals.append((time.perf_counter(), len(ids)))
                        token_ids += ids
                if "espalier" in chunk:
                    reported = chunk["espalier"]["token_sha256"]
        if reported != token_sha256(token_ids):
            raise StreamError(
                f"the reply reports token_sha256 {reported}, its tokens hash to {token_sha256(token_ids)}"
            )
    except (StreamError, aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return StreamRecord(
        prompt=prompt.name,
        sent=sent,
        arrivals=tuple(arrivals),
        ended=time.perf_counter(),
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        token_sha256=reported if error is None else None,
        error=error,
    )


async def sse_chunks(lines: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """JSON objects of an event stream up to `[DONE]`; comments are skipped. Raises StreamError when the stream breaks off before it."""
    async for raw in lines:
        line = raw.decode().rstrip("\r\n")
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield json.loads(data)
    raise StreamError("the stream broke off before [DONE]")
