"""Requests to an ASGI application without a server. Several can run concurrently, and a client can
disconnect."""

from __future__ import annotations

import asyncio
import json
from typing import Any


def scope_of(method: str, path: str, **headers: str) -> dict[str, Any]:
    """The scope of a request to loopback. Header names have "_" for "-"."""
    given = {"host": "127.0.0.1", "content-type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    fields = [(name.encode(), value.encode()) for name, value in given.items()]
    return {"type": "http", "method": method, "path": path, "headers": fields, "query_string": b""}


async def call(
    app: Any, method: str, path: str, body: Any = None, left: asyncio.Event | None = None
) -> tuple[int, Any]:
    """Status and body of one response. The client disconnects when `left` is set."""
    sent: list[dict[str, Any]] = []
    parts = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if parts:
            return parts.pop()
        await (left or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope_of(method, path), receive, send)
    return int(sent[0]["status"]), json.loads(sent[1]["body"])
