"""Wall-clock times that can be compared with each other."""

from __future__ import annotations

import time

__all__ = ["SteadyClock"]


class SteadyClock:
    """Unix seconds that never go back: the wall clock is read once, here, and what has passed since is counted on the monotonic clock. So the times of
    one process stay in order when somebody sets the machine's clock."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset + time.monotonic()
