"""One question to every replica of a deployment, and the answers that come."""

from __future__ import annotations

import asyncio
import time
from typing import Any

__all__ = ["ask_all"]


async def ask_all(handle: Any, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
    """What each live replica answers, in no order: the exception of one that raised, TimeoutError for one that has not answered in time.

    Serve's own collection of a broadcast's results gives up every answer when one is late, so a single replica that stands still would silence all.

    Raises:
        DeploymentUnavailableError: no replica is up.
        TimeoutError: Serve did not say in time which replicas there are.
    """
    deadline = time.monotonic() + timeout_s
    results = await asyncio.wait_for(handle.broadcast(method, *arguments)._fetch_replica_results_async(), timeout_s)
    asked = [asyncio.ensure_future(result.get_async()) for result in results]
    try:
        if asked:
            await asyncio.wait(asked, timeout=max(deadline - time.monotonic(), 0))
        return [_answer(one, f"{method}: no answer in {timeout_s:g} s") for one in asked]
    finally:
        for one in asked:
            one.cancel()


def _answer(asked: asyncio.Future[Any], late: str) -> Any:
    if not asked.done():
        return TimeoutError(late)
    if asked.cancelled():
        return TimeoutError("the replica cancelled the request")
    return asked.exception() or asked.result()
