"""Chooses a rank's torch threads while it trains, from the cores that its node leaves idle.

Generators wait for the learner while the staleness bound holds them back. A learner with a fixed
number of threads then leaves their cores idle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

__all__ = ["CpuTimes", "Threads", "cpu_times"]

SHORTEST_S = 0.2
"""Shortest time between two choices. The system counts CPU time in units of 10 ms."""
ALMOST = 0.3
"""A core counts as free if at most this part of it is used."""


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds since a fixed moment: of the clock, of the node's idle cores together, and of this
    process."""

    clock: float
    idle: float
    own: float


def cpu_times() -> CpuTimes:
    """The times of now."""
    return CpuTimes(time.monotonic(), psutil.cpu_times().idle, time.process_time())


class Threads:
    """The number of torch threads of this process. `adapt` is called between micro-batches."""

    def __init__(
        self,
        setting: int | Literal["auto"],
        most: int | None = None,
        times: Callable[[], CpuTimes] = cpu_times,
    ) -> None:
        """
        Args:
            setting: `learner.num_threads`. A number stays fixed.
            most: largest number of threads; default: the cores that this process may use.
        """
        self.auto = setting == "auto"
        self.count = 1 if setting == "auto" else setting
        self._most = most or len(os.sched_getaffinity(0))
        self._times, self._before = times, times()
        torch.set_num_threads(self.count)

    def adapt(self) -> None:
        """Use the cores that this process has used or found idle since the last choice. One thread
        is always used."""
        if not self.auto:
            return
        now, before = self._times(), self._before
        seconds = now.clock - before.clock
        if seconds < SHORTEST_S:
            return
        self._before = now
        free = (now.idle - before.idle + now.own - before.own) / seconds
        count = max(1, min(self._most, int(free + ALMOST)))
        if count != self.count:
            self.count = count
            torch.set_num_threads(count)
