"""Server-sent events: streams an answer, and ends its work when the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from asyncrl.web.connection import ClientLeftError, while_connected


class Closable(Protocol):
    async def aclose(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Event:
    """A server-sent event. `data` is sent as JSON, or as it is if it is a text (`[DONE]`)."""

    data: Mapping[str, Any] | str
    name: str | None = None
    """Of the event's type, if the API gives one."""


DONE = Event("[DONE]")
"""The last event of a complete answer in OpenAI's older APIs. It is not sent after an error."""


COMMENT = ": sampling\n\n"
"""Sent while there is no event. Clients ignore it, but know that the server lives."""
FIRST_COMMENT_S, COMMENT_S = 0.1, 2.0
"""Seconds without an event until a comment is sent: at the beginning, and later."""


class EventStream(Response):
    """Sends events while the client is connected, and comments while there is none. An exception
    becomes a last event."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[Event, None],
        source: Closable,
        failed: Callable[[Exception, int], Event],
        left: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            source: what `events` reads. It is closed too, even if `events` never started.
            failed: the event of an exception, after this many events.
            left: called if the client closes the connection before the end.
        """
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # Response sets it to 0
        self._events, self._source, self._failed, self._left = events, source, failed, left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._source):
            try:
                await while_connected(receive, self._send(send))
            except ClientLeftError:
                self._left()

    async def _send(self, send: Send) -> None:
        writing = asyncio.Lock()
        quiet = asyncio.Event()

        async def put(message: Message) -> None:
            quiet.clear()
            async with writing:
                try:
                    await send(message)
                except OSError:  # the server noticed the closed connection first
                    raise ClientLeftError from None

        await put({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        comments = asyncio.ensure_future(_comment(put, quiet))
        try:
            await self._send_events(put)
        finally:
            comments.cancel()
            await asyncio.gather(comments, return_exceptions=True)
        await put({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, put: Send) -> None:
        sent = 0
        async with contextlib.aclosing(self._events) as events:
            try:
                async for event in events:
                    await put(_body(event_text(event)))
                    sent += 1
            except ClientLeftError:
                raise
            except Exception as error:
                await put(_body(event_text(self._failed(error, sent))))


async def _comment(put: Send, quiet: asyncio.Event) -> None:
    """Send a comment whenever nothing was sent for a while.

    Args:
        quiet: cleared by everything that is sent.
    """
    wait_s = FIRST_COMMENT_S
    while True:
        quiet.set()
        await asyncio.sleep(wait_s)
        if quiet.is_set():
            await put(_body(COMMENT))
        wait_s = COMMENT_S


def _body(text: str) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": True}


def event_text(event: Event) -> str:
    """An event as it is sent.

    Raises:
        ValueError: its data has a number that JSON does not have.
    """
    data = event.data
    text = data if isinstance(data, str) else json.dumps(data, allow_nan=False)
    return ("" if event.name is None else f"event: {event.name}\n") + f"data: {text}\n\n"
