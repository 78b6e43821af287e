"""Server-sent events: an answer that is sent while it is made, and that ends as soon as nobody
reads it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response

__all__ = ["ClientLeftError", "EventStream", "while_connected"]

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]
DONE = "[DONE]"
"""The data of the last event of a whole answer. After an error it does not come."""


class ClientLeftError(Exception):
    """The client has closed its connection."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The work's result. It is cancelled as soon as the client is gone, so that its KV cache is
    free for others.

    Raises:
        ClientLeftError: the client was faster.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream(Response):
    """One event for each object, then `[DONE]`. What raises becomes an event with an error, and the
    last one."""

    media_type = "text/event-stream"

    def __init__(
        self,
        objects: AsyncGenerator[dict[str, Any], None],
        source: AsyncGenerator[Any, None],
        failed: Callable[[Exception], dict[str, Any]],
    ) -> None:
        """
        Args:
            source: what `objects` are made of. Closed with them, also if none of them was asked
                for.
            failed: makes an exception an object.
        """
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # of the empty body that Response knows of
        self._objects, self._source, self._failed = objects, source, failed

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with contextlib.aclosing(self._source):
            with contextlib.suppress(ClientLeftError):
                await while_connected(receive, self._send(send))

    async def _send(self, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._objects) as objects:
            try:
                async for one in objects:
                    await send(_event(json.dumps(one, allow_nan=False)))
                await send(_event(DONE))
            except OSError:  # a server that notices the closed connection first
                raise ClientLeftError from None
            except Exception as error:
                await send(_event(json.dumps(self._failed(error))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(data: str) -> dict[str, Any]:
    return {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}


async def _left(receive: Receive) -> None:
    message = await receive()
    while message["type"] != "http.disconnect":
        message = await receive()
