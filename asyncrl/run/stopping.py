"""What ends a run early: signals, and the caller of `asyncrl.train`.

The first request lets the run finish its step and write a checkpoint, within a time limit. The
second one does not wait for that.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from asyncrl.runtime.redact import print_shown

logger = logging.getLogger("asyncrl")

CAUSES = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGHUP, because the terminal was closed",
}
"""Signal that ends a run → its name for the user."""
SENT_TWICE = (CAUSES[signal.SIGTERM], CAUSES[signal.SIGHUP])
"""Causes that come twice for one request: from `timeout`, and from a closing terminal."""
ONE_REQUEST_S = 2.0
"""Seconds within which such causes are the same request."""


def is_repeated(cause: str, seconds: float) -> bool:
    """Whether a signal, this long after the first, is the same request again."""
    return cause in SENT_TWICE and seconds <= ONE_REQUEST_S


@contextmanager
def handling_signals(handle: Callable[[str], None]) -> Iterator[None]:
    """Call `handle` with the cause of each signal of `CAUSES` during the body. A signal that was
    ignored before, as SIGHUP is under `nohup`, stays ignored. Without effect outside the main
    thread, which alone receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, frame: FrameType | None) -> None:
        handle(CAUSES[signal.Signals(number)])

    before = {
        number: signal.signal(number, handler)
        for number in CAUSES
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, old in before.items():
            if old is not None:  # a handler of a library, which Python cannot set again
                signal.signal(number, old)


class Stop:
    """Ends the attempt that is running. Requests may come from any thread, or from a signal."""

    def __init__(self) -> None:
        self.cause = ""
        """Why the run ends early, for the user. "" = nobody asked."""
        self.over = False
        """Whether the attempt has its outcome, which later requests do not change."""
        self.finish_step: Callable[[], bool] = lambda: False
        """Asks the attempt to end after its step, with a checkpoint. False if it has nothing to
        save."""
        self._limit_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[object] | None = None
        self._asked = 0.0

    @contextmanager
    def ending(self, limit_s: float) -> Iterator[None]:
        """Requests end the current task during the body.

        Args:
            limit_s: seconds that the step in progress and its checkpoint get; 0 = none.
        """
        self._limit_s, self._task = limit_s, asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        if self.cause:  # asked for before the attempt began
            self._end_now()
        try:
            yield
        finally:
            self._loop = self._task = None
            self.finish_step = lambda: False

    def ask(self, cause: str) -> None:
        """Ask the run to end. Between two attempts it ends at once, with KeyboardInterrupt if this
        is the main thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ask, cause)
            return
        if self.cause and is_repeated(cause, time.monotonic() - self._asked):
            return
        if not self.cause:
            self.cause, self._asked = cause, time.monotonic()
        if not self.over and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    def _ask(self, cause: str) -> None:
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.cancelling():
            print_shown(
                "\nasyncrl: already stopping; each part gets a few seconds to end", file=sys.stderr
            )
        elif not self.cause:
            self.cause, self._asked = cause, time.monotonic()
            logger.info("the run stops: %s", cause)
            if self._limit_s and self.finish_step():
                print_shown(
                    f"\nasyncrl: {cause}: the run finishes its step and writes a checkpoint, for at"
                    f" most {self._limit_s:g} s (checkpoint.on_stop_s); a second signal does not"
                    " wait",
                    file=sys.stderr,
                )
                loop.call_later(self._limit_s, self._end_late)
            else:
                self._end_now()
        elif not is_repeated(cause, time.monotonic() - self._asked):
            logger.info("the run stops without a checkpoint: %s", cause)
            self._end_now()

    def _end_late(self) -> None:
        if self._task is not None and not self._task.cancelling():
            logger.warning(
                "the step and its checkpoint took longer than checkpoint.on_stop_s = %g s, and were"
                " given up",
                self._limit_s,
            )
            self._end_now()

    def _end_now(self) -> None:
        """Cancel the task once, so that its clean-up can finish."""
        if self._task is not None and not self._task.cancelling():
            self._task.cancel()
