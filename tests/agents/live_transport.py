"""A transport to an application in this process. Unlike httpx2's own one, it delivers an answer
while it is made, and tells the application when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2


class LiveTransport(httpx2.AsyncBaseTransport):
    def __init__(self, app: Any) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        exchange = _Exchange(await request.aread())
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "scheme": "http",
            "path": request.url.path,
            "raw_path": request.url.raw_path,
            "query_string": request.url.query,
            "server": (request.url.host, 80),
            "client": ("127.0.0.1", 1),
            "root_path": "",
        }
        exchange.task = asyncio.ensure_future(self._app(scope, exchange.receive, exchange.send))
        exchange.task.add_done_callback(lambda _: exchange.messages.put_nowait(None))
        try:
            start = await exchange.messages.get()
        except asyncio.CancelledError:
            await exchange.leave()
            raise
        if start is None:
            exchange.task.result()
            raise httpx2.RemoteProtocolError("no answer")
        return httpx2.Response(start["status"], headers=start["headers"], stream=_Body(exchange))


class _Exchange:
    """One request and its answer."""

    task: asyncio.Future[None]

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._left = asyncio.Event()
        self.messages: asyncio.Queue[Any] = asyncio.Queue()

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.messages.put_nowait(message)

    async def leave(self) -> None:
        """Close the connection, and wait until the application has noticed."""
        self._left.set()
        await asyncio.wait([self.task])


class _Body(httpx2.AsyncByteStream):
    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self._exchange.messages.get()) is not None:
            yield message.get("body", b"")
        self._exchange.task.result()

    async def aclose(self) -> None:
        await self._exchange.leave()
