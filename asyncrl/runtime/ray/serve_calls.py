"""Handles of Serve applications from any process, and calling a method of every replica."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from asyncrl.contracts.errors import InvalidRequestError

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle, DeploymentResponse

Handle: TypeAlias = "DeploymentHandle[Any]"
"""The handle of a Serve deployment. Ray does not type the methods of the deployed class."""

ADDRESS = "RAY_ADDRESS"


def cluster_environment() -> dict[str, str] | None:
    """An environment for a child process from which it can connect to this process's Ray cluster.
    None: this process is not connected, and the child inherits its environment."""
    ray = sys.modules.get("ray")  # without importing it
    if ray is None or not ray.is_initialized():
        return None
    return {**os.environ, ADDRESS: ray.get_runtime_context().gcs_address}


def application_handle(name: str) -> Handle:
    """The handle of a Serve application. Connects this process to the cluster at RAY_ADDRESS if it
    is not connected.

    Raises:
        LookupError: RAY_ADDRESS is not set, or there is no such application. The message says what
            to do.
    """
    import ray
    from ray import serve
    from ray.serve.exceptions import RayServeException

    if not ray.is_initialized():
        if not os.environ.get(ADDRESS):
            raise LookupError(
                f"{ADDRESS} is not set; set it to the cluster of the Serve application"
            )
        ray.init(os.environ[ADDRESS], log_to_driver=False, logging_level=logging.ERROR)
    try:
        return serve.get_app_handle(name)
    except RayServeException as error:
        why = str(error).splitlines()[0]
        raise LookupError(
            f"{why}; deploy the application on the cluster at {ADDRESS}, or correct the name"
        ) from None


async def ask_one(handle: Handle, method: str, **arguments: object) -> Any:
    """The answer of one replica. The request ends if the caller is canceled.

    Raises:
        InvalidRequestError: the replica refuses the request.
        ConnectionError: no replica can answer now, or this one raised another error.
    """
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        response = cast(
            "DeploymentResponse[Any]", handle.options(method_name=method).remote(**arguments)
        )
        try:
            return await response
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                # This task was not canceled: the replica is ending, and cancels its requests.
                raise ConnectionError("a replica canceled the request") from None
            response.cancel()
            raise
    except (RayError, RayServeException) as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, InvalidRequestError):
            raise InvalidRequestError(str(cause)) from None
        raise ConnectionError(f"{type(error).__name__}: {error}".splitlines()[0]) from None


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
