"""Answers requests with the parts that a server makes, as a whole or as a stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from asyncrl.api.contract import Dialect, Part
from asyncrl.api.errors import as_api_error, error_event
from asyncrl.api.http import path_of
from asyncrl.web.connection import ClientLeftError, while_connected
from asyncrl.web.events import EventStream


async def answered(
    request: Request,
    dialect: Dialect,
    parts: AsyncGenerator[Part, None],
    head: Callable[[], Awaitable[object]],
    left: Callable[[], None] = lambda: None,
) -> Response:
    """The answer to a request. A failure before the head of a stream has its own status.

    Args:
        parts: of the answer. Of one that is not streamed, each is a whole choice. It is closed.
        head: ends when a stream without a part sends its head. A client with an idle timeout would
            leave.
        left: called if the client closes the connection before the end.
    """
    try:
        if dialect.streams:
            return await _stream(request, dialect, parts, head, left)
        return JSONResponse(await while_connected(request.receive, _whole(dialect, parts)))
    except ClientLeftError:
        left()
        raise


async def _whole(dialect: Dialect, parts: AsyncGenerator[Part, None]) -> dict[str, object]:
    async with contextlib.aclosing(parts):
        whole = sorted([part async for part in parts], key=lambda part: part.choice)
    body = dialect.answer([part.answer for part in whole if part.answer is not None])
    for part in whole:
        body |= part.of_body
    return body


async def _stream(
    request: Request,
    dialect: Dialect,
    parts: AsyncGenerator[Part, None],
    head: Callable[[], Awaitable[object]],
    left: Callable[[], None],
) -> Response:
    first, waiting = asyncio.ensure_future(anext(parts)), asyncio.ensure_future(head())
    opened = contextlib.AsyncExitStack()
    opened.push_async_callback(parts.aclose)
    opened.push_async_callback(_canceled, first, waiting)
    try:
        either = asyncio.wait([first, waiting], return_when=asyncio.FIRST_COMPLETED)
        await while_connected(request.receive, either)
        if first.done():
            first.result()  # raises a failure
    except BaseException:
        await opened.aclose()
        raise
    path = path_of(request.scope)
    return EventStream(
        dialect.events(_again(first, parts)),
        opened,
        lambda error, sent: error_event(path, as_api_error(error), sent),
        left,
    )


async def _again(
    first: asyncio.Future[Part], rest: AsyncGenerator[Part, None]
) -> AsyncIterator[Part]:
    yield await first
    async for part in rest:
        yield part


async def _canceled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
