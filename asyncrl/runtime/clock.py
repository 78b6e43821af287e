"""Times of day that can be compared with each other, and with the monotonic clock."""

from __future__ import annotations

import os
import time
from pathlib import Path

_OFFSET = time.time() - time.monotonic()


def steady_time() -> float:
    """Unix seconds that never decrease within a process, even if the machine's clock is set: the
    wall time at import plus the monotonic time since."""
    return steady_time_of(time.monotonic())


def steady_time_of(monotonic: float) -> float:
    """`steady_time` at a moment of this machine's monotonic clock, which its processes share."""
    return _OFFSET + monotonic


def process_began() -> float:
    """When this process began, in seconds of the monotonic clock."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
