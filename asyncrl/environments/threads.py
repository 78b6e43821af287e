"""The threads of blocking calls in an environment process. A thread cannot be ended, so those that
outlive their session are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from asyncrl.environments.running import AgentFailedError


class CallThreads(ThreadPoolExecutor):
    """The executor of `asyncio.to_thread`.

    Args:
        most: threads, at most.
        number: returns the number of the session whose code runs.
    """

    def __init__(self, most: int, number: Callable[[], int]) -> None:
        super().__init__(most, "call")
        self._number = number
        self._calls: dict[Future[Any], int] = {}

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin a call, which counts for the session whose code runs."""
        call = super().submit(fn, *args, **kwargs)
        self._calls[call] = self._number()
        call.add_done_callback(self._calls.pop)
        return call

    def left(self, running: Container[int]) -> int:
        """The number of calls that go on and belong to none of these sessions."""
        return sum(number not in running for number in list(self._calls.values()))


async def in_thread(call: Callable[[], object]) -> object:
    """What a blocking call returns. It raises what the call raises, and AgentFailedError for an
    exit, which would end the process with all other sessions."""
    result, failure = await asyncio.to_thread(partial(_outcome, call))
    if failure is not None:
        raise failure
    return result


def _outcome(call: Callable[[], object]) -> tuple[object, Exception | None]:
    """What a call returns or raises. A future takes no StopIteration as its exception."""
    try:
        return call(), None
    except SystemExit as leaving:
        return None, AgentFailedError(f"the function called sys.exit({leaving.code!r})")
    except Exception as error:
        return None, error
