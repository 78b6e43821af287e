"""Server-sent events: streams an answer, and cancels its generation when the client
disconnects."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from asyncrl.runtime.connection import ClientLeftError, while_connected

__all__ = ["EventStream"]

DONE = "[DONE]"
"""Data of the last event of a complete answer. It is not sent after an error."""


class EventStream(Response):
    """Sends one event for each object, then `[DONE]`. An exception becomes a last event with an
    error."""

    media_type = "text/event-stream"

    def __init__(
        self,
        objects: AsyncGenerator[dict[str, object], None],
        source: AsyncGenerator[object, None],
        failed: Callable[[Exception], dict[str, object]],
    ) -> None:
        """
        Args:
            source: the generator that `objects` reads. It is closed too, even if `objects` never
                started.
            failed: converts an exception to an object.
        """
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # Response sets it to 0
        self._objects, self._source, self._failed = objects, source, failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._source):
            with contextlib.suppress(ClientLeftError):
                await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._objects) as objects:
            try:
                async for item in objects:
                    await send(_event(json.dumps(item, allow_nan=False)))
                await send(_event(DONE))
            except OSError:  # the server noticed the closed connection first
                raise ClientLeftError from None
            except Exception as error:
                await send(_event(json.dumps(self._failed(error))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(data: str) -> Message:
    return {"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True}
