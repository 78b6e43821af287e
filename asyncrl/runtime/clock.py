"""Times of day that can be compared with each other, and with the monotonic clock."""

from __future__ import annotations

import time

import psutil

__all__ = ["process_began", "steady_time"]

_OFFSET = time.time() - time.monotonic()


def steady_time() -> float:
    """Unix seconds that never decrease within a process, even if the machine's clock is set: the
    wall time at import plus the monotonic time since."""
    return _OFFSET + time.monotonic()


def process_began() -> float:
    """When this process began, in seconds of the monotonic clock."""
    return psutil.Process().create_time() - _OFFSET
