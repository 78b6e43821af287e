"""Closes the parts of an attempt, each within a time limit, and logs those that fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger("asyncrl")

CLOSE_TIMEOUT_S = 10.0
"""Seconds that one part gets to close. What it still holds is freed when the cluster ends."""


class Closing(AsyncExitStack):
    """Closes parts in reverse order, and adds the names of those that failed to `failed`."""

    def __init__(self, failed: list[str]) -> None:
        super().__init__()
        self._failed = failed

    def add(self, name: str, close: Callable[[], Awaitable[object]]) -> None:
        """Close a part at the end of this block. `name` is its name in the log."""
        self.push_async_callback(close_part, name, close, self._failed)


async def close_part(name: str, close: Callable[[], Awaitable[object]], failed: list[str]) -> None:
    """Close one part within CLOSE_TIMEOUT_S, so that a part that hangs does not stop the others."""
    try:
        await asyncio.wait_for(close(), CLOSE_TIMEOUT_S)
    except Exception as error:
        failed.append(name)
        logger.warning("closing %s: %s: %s", name, type(error).__name__, error)


async def cancel(task: asyncio.Task[T]) -> None:
    """Cancel a task and wait for its end."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
