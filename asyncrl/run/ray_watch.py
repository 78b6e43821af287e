"""Ends a run whose Ray cluster has ended. Ray itself waits a minute for the cluster, and then ends
the driver with words that name neither the run nor the way on."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from asyncrl.contracts.errors import PartDiedError
from asyncrl.run.cluster.cluster import RayEndedError, wait_until_ray_ends
from asyncrl.runtime.output import drain_output, flush_output

logger = logging.getLogger("asyncrl")

KNOWN_S = 2.0
"""Seconds until the end of a local cluster is known. A part of the run may notice it before."""
CANCEL_EVERY_S = 1.0
"""Seconds that each closing part gets once the cluster has ended."""
GIVE_UP_S = 15.0
"""Seconds after which the process ends although a call of Ray has not returned."""


class RayWatch:
    """Looks in a thread, because a call of Ray may block the event loop. A context manager around
    the event loop of one attempt."""

    def __init__(self, end: Callable[[BaseException], int]) -> None:
        """
        Args:
            end: says and records how the attempt ended, and returns the exit code.
        """
        self._end = end
        self._main = threading.current_thread() is threading.main_thread()
        self._over = threading.Event()
        self._found: RayEndedError | None = None
        self._code: int | None = None
        """The exit code, once the end of the cluster has been said and recorded."""
        self._cancel: Callable[[], object] = lambda: None

    def __enter__(self) -> RayWatch:
        threading.Thread(target=self._watch, name="asyncrl-ray-watch", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Cancel the body once the cluster has ended. Enter this inside of what shuts Ray down: a
        shutdown without a cluster can end this process, so the cause is said before.

        Raises:
            RayEndedError: it has, whatever else has failed because of that.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel() -> None:
            if not task.done():
                task.cancel()

        self._cancel = lambda: loop.call_soon_threadsafe(cancel)
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, PartDiedError) and self._found is None:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(KNOWN_S)
            if self._found is not None:
                self._found.__cause__ = error
                self._say(self._found)
                raise self._found from error
            raise

    def ended(self) -> int | None:
        """The exit code if the cluster has ended, which is said if it was not; None: it has not."""
        return None if self._found is None else self._say(self._found)

    def _say(self, error: RayEndedError) -> int:
        if self._code is None:
            self._code = self._end(error)
            flush_output()  # a shutdown of Ray may end this process at once
        return self._code

    def _watch(self) -> None:
        self._found = error = wait_until_ray_ends(self._over)
        if error is None:
            return
        logger.error("%s", error)
        began = time.monotonic()
        while not self._over.wait(CANCEL_EVERY_S):
            with suppress(RuntimeError):  # the event loop is closed
                self._cancel()  # each part that closes may wait for an answer of the cluster
            if self._main and time.monotonic() - began > GIVE_UP_S:
                code = self._say(error)
                drain_output()
                os._exit(code)
