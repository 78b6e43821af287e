"""An event loop whose clock a test puts forward: a limit of minutes is reached at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class ClockAhead(asyncio.SelectorEventLoop):
    """Its clock is ahead of the real one. Other processes and threads take their real time. Use it
    as `asyncio.Runner(loop_factory=ClockAhead)`."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


def put_forward(seconds: float) -> None:
    """Put the clock of the running loop forward."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ClockAhead)
    loop.ahead_s += seconds


async def until(state: Callable[[], object]) -> None:
    """Wait until the state is true."""
    while not state():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
