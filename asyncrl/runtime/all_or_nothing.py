"""Several coroutines at once, all or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import TypeVar

Result = TypeVar("Result")


async def all_or_nothing(works: Iterable[Coroutine[object, None, Result]]) -> list[Result]:
    """All results, in order. The first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
