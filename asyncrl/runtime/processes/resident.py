"""The memory that processes have now."""

from __future__ import annotations

import os

import psutil


def resident_bytes(*others: int) -> int:
    """Resident memory of this process and of the processes with these ids, in bytes. Pages that
    several processes share count in each. A process that has ended counts as 0."""
    return sum(map(_resident, {os.getpid(), *others}))


def used_ratio() -> float:
    """Share of this machine's memory that is in use (0..1)."""
    return float(psutil.virtual_memory().percent) / 100


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
