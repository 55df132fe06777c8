"""One streamed reply as an HTTP client sees it, with the time at which each message came. Over aiohttp, which `ray[serve]` brings.

The client trusts nothing: it hashes the token ids that it received and holds the hash against the one reported.
"""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from espalier.deploy.bench.stats import StreamRecord, spread_tokens
from espalier.replicas.token_hash import token_sha256


class StreamError(Exception):
    """The stream did not end as it should have; the message says how."""


@dataclass(slots=True)
class _Seen:
    """What a stream has brought so far. text_times: of messages with text, for servers that do not tell tokens."""

    arrivals: list[tuple[float, int]] = field(default_factory=list)
    text_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    reported: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, chunk: dict[str, Any]) -> None:
        """One message. Raises StreamError for one that tells of an error."""
        now = time.perf_counter()
        if "error" in chunk:
            error = chunk["error"]
            raise StreamError(f"error event: {error.get('message') if isinstance(error, dict) else error}")
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            if ids := choice.get("token_ids"):
                self.arrivals.append((now, len(ids)))
                self.token_ids += ids
            if choice.get("text") or any(
                (choice.get("delta") or {}).get(key) for key in ("content", "reasoning_content")
            ):
                self.text_times.append(now)
        if "espalier" in chunk:
            self.reported = chunk["espalier"]["token_sha256"]


async def stream_reply(
    session: aiohttp.ClientSession,
    url: str,
    name: str,
    body: dict[str, Any],
    *,
    is_exact: bool,
    leave_after: int | None = None,
) -> StreamRecord:
    """Posts one request and reads its stream to the end, or until the reply has leave_after tokens. Failures end up in the record.

    is_exact: the server tells token ids and their hash; both are demanded then. name: the prompt's.
    """
    sent = time.perf_counter()
    seen, left, error = _Seen(), False, None
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                raise StreamError(f"status {response.status}: {(await response.text())[:300]}")
            left = leave_after == 0
            if not left:
                async for chunk in sse_chunks(response.content):
                    seen.take(chunk)
                    if leave_after is not None and len(seen.token_ids) >= leave_after and seen.reported is None:
                        left = True
                        break
            if left:
                response.close()
        if is_exact and not left and seen.reported != token_sha256(seen.token_ids):
            raise StreamError(
                f"the reply reports token_sha256 {seen.reported}, its tokens hash to {token_sha256(seen.token_ids)}"
            )
    except (StreamError, aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    arrivals = tuple(seen.arrivals) or spread_tokens(seen.text_times, seen.usage.get("completion_tokens") or 0)
    return StreamRecord(
        prompt=name,
        sent=sent,
        arrivals=arrivals,
        ended=time.perf_counter(),
        prompt_tokens=seen.usage.get("prompt_tokens", 0),
        cached_tokens=(seen.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        token_ids=tuple(seen.token_ids),
        token_sha256=seen.reported if error is None and not left else None,
        left=left,
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
