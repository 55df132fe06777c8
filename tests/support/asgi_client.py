"""One request to an ASGI app, in process: no port, no thread."""

import asyncio
import json
from typing import Any

import httpx
from starlette.types import ASGIApp


def ask(app: ASGIApp, method: str, path: str, **options: Any) -> httpx.Response:
    """The whole reply; `options` are httpx's (json, content, headers). An exception of the app comes through."""

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


def sse_events(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream; checks that it ends with [DONE] and that every block is an event or a comment."""
    blocks = text.removesuffix("\n\n").split("\n\n")
    assert blocks[-1] == "data: [DONE]"
    assert all(block.startswith(("data: ", ": ")) for block in blocks)
    return [json.loads(block[len("data: ") :]) for block in blocks[:-1] if not block.startswith(": ")]
