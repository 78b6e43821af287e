"""Times of day that can be compared with each other."""

from __future__ import annotations

import time

__all__ = ["steady_time"]

_OFFSET = time.time() - time.monotonic()


def steady_time() -> float:
    """Unix seconds that never go back: the wall clock is read once, when the process begins, and
    what has passed since is counted on the monotonic clock. So the times of one process stay in
    order when the machine's clock is set."""
    return _OFFSET + time.monotonic()
