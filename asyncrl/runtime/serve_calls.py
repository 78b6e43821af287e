"""One question to every replica of a deployment, and the answers that come."""

from __future__ import annotations

import asyncio
import time
from typing import Any

__all__ = ["ask_all"]


async def ask_all(
    handle: Any,
    method: str,
    *arguments: Any,
    timeout_s: float,
    spare: int = 0,
    grace_s: float | None = None,
) -> list[Any]:
    """What each live replica answers, in no order: the exception of one that raised, TimeoutError
    for one that has not answered in time.

    Args:
        spare: replicas whose answers are not waited for, once all others have answered.
        grace_s: seconds after which the answers of at least half of the replicas are enough, those
            that raised left out. None: they never are.

    Serve's own collection of a broadcast's results gives up every answer when one is late, so a
    single replica that hangs would silence all.

    Raises:
        DeploymentUnavailableError: no replica is up.
        TimeoutError: Serve did not say in time which replicas there are.
    """
    deadline = time.monotonic() + timeout_s
    results = await asyncio.wait_for(
        handle.broadcast(method, *arguments)._fetch_replica_results_async(), timeout_s
    )
    asked = [asyncio.ensure_future(result.get_async()) for result in results]
    try:
        await _enough(
            asked, deadline, spare, None if grace_s is None else deadline - timeout_s + grace_s
        )
        return [_answer(one, f"{method}: no answer in {timeout_s:g} s") for one in asked]
    finally:
        for one in asked:
            one.cancel()


async def _enough(
    asked: list[asyncio.Future[Any]], deadline: float, spare: int, grace_ends: float | None
) -> None:
    """Wait until the deadline, or until enough have answered."""
    waiting = set(asked)
    while waiting and (now := time.monotonic()) < deadline:
        answered = len(asked) - len(waiting)
        if answered and len(waiting) <= spare:
            return
        failed = sum(
            one.done() and (one.cancelled() or one.exception() is not None) for one in asked
        )
        if (
            grace_ends is not None
            and now >= grace_ends
            and answered > failed
            and 2 * (answered - failed) >= len(asked) - failed
        ):
            return
        until = (
            min(deadline, grace_ends) if grace_ends is not None and now < grace_ends else deadline
        )
        _, waiting = await asyncio.wait(
            waiting, timeout=until - now, return_when=asyncio.FIRST_COMPLETED
        )


def _answer(asked: asyncio.Future[Any], late: str) -> Any:
    if not asked.done():
        return TimeoutError(late)
    if asked.cancelled():
        return TimeoutError("the replica cancelled the request")
    return asked.exception() or asked.result()
