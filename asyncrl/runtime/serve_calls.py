"""Calling a method of every replica of a Serve deployment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

__all__ = ["Handle", "ask_all"]

Handle: TypeAlias = "DeploymentHandle[Any]"
"""The handle of a Serve deployment. Ray does not type the methods of the deployed class."""


async def ask_all(
    handle: Handle,
    method: str,
    *arguments: object,
    timeout_s: float,
    spare: int = 0,
    grace_s: float | None = None,
) -> list[Any]:
    """Call a method of every live replica and collect the results, in no particular order.

    A replica that raised contributes its exception, and one that is late a TimeoutError. Serve's
    own collection of a broadcast drops all results when one is late.

    Args:
        spare: replicas that need not answer once all others have.
        grace_s: seconds after which results of at least half of the replicas are enough, not
            counting those that raised. None = never.

    Raises:
        DeploymentUnavailableError: no replica is up.
        TimeoutError: Serve did not list the replicas in time.
    """
    deadline = time.monotonic() + timeout_s
    results = await asyncio.wait_for(
        handle.broadcast(method, *arguments)._fetch_replica_results_async(), timeout_s
    )
    calls = [asyncio.ensure_future(result.get_async()) for result in results]
    try:
        await _enough(
            calls, deadline, spare, None if grace_s is None else deadline - timeout_s + grace_s
        )
        return [_result(call, f"{method}: no answer in {timeout_s:g} s") for call in calls]
    finally:
        for call in calls:
            call.cancel()


async def _enough(
    calls: Sequence[asyncio.Future[object]], deadline: float, spare: int, grace_ends: float | None
) -> None:
    """Wait until the deadline, or until enough calls are done."""
    waiting = set(calls)
    while waiting and (now := time.monotonic()) < deadline:
        answered = len(calls) - len(waiting)
        if answered and len(waiting) <= spare:
            return
        failed = sum(
            call.done() and (call.cancelled() or call.exception() is not None) for call in calls
        )
        if (
            grace_ends is not None
            and now >= grace_ends
            and answered > failed
            and 2 * (answered - failed) >= len(calls) - failed
        ):
            return
        until = (
            min(deadline, grace_ends) if grace_ends is not None and now < grace_ends else deadline
        )
        _, waiting = await asyncio.wait(
            waiting, timeout=until - now, return_when=asyncio.FIRST_COMPLETED
        )


def _result(call: asyncio.Future[object], late: str) -> object:
    if not call.done():
        return TimeoutError(late)
    if call.cancelled():
        return TimeoutError("the replica canceled the request")
    return call.exception() or call.result()
