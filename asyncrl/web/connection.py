"""Work for a client that may close its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

T = TypeVar("T")


class ClientLeftError(Exception):
    """The client closed its connection."""


async def while_connected(
    receive: Callable[[], Awaitable[MutableMapping[str, Any]]], work: Awaitable[T]
) -> T:
    """Await `work`, and cancel it when the client disconnects, which frees its KV cache.

    Args:
        receive: of the ASGI request, whose body has been read.

    Raises:
        ClientLeftError: the client disconnected first.
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


async def _left(receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> None:
    message = await receive()
    while message["type"] != "http.disconnect":
        message = await receive()
