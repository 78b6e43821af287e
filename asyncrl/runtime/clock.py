"""Times of day that can be compared with each other."""

from __future__ import annotations

import time

__all__ = ["steady_time"]

_OFFSET = time.time() - time.monotonic()


def steady_time() -> float:
    """Unix seconds that never decrease within a process, even if the machine's clock is set: the
    wall time at import plus the monotonic time since."""
    return _OFFSET + time.monotonic()
