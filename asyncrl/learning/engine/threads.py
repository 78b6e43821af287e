"""Chooses a rank's torch threads while it trains: the number that trains the most tokens per
second, on cores of which other processes use little.

Generators wait for the learner while the staleness bound holds them back. A learner with a fixed
number of threads then leaves their cores idle. But small matrices become slower with more threads.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import psutil
import torch

from asyncrl.sandbox.machine import usable_cpus

SHORTEST_S = 0.2
"""Shortest time between two choices. The system counts CPU time in units of 10 ms."""
MOST_USED = 0.75
"""A core is free for a thread if others use at most this part of it. With 0.6, a generator that
works half of the time made the number change from step to step."""
AGAIN = 32
"""The next lower and higher number of threads are tried again after this many choices."""
NEW = 0.5
"""Weight of a new measurement in the mean. Other processes can disturb a single one."""


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds since a fixed moment: of the clock, of all idle cores together that this process may
    use, and of this process."""

    clock: float
    idle: float
    own: float


def cpu_times() -> CpuTimes:
    """The times of now."""
    of_cores = psutil.cpu_times(percpu=True)
    idle = sum(of_cores[core].idle for core in os.sched_getaffinity(0) if core < len(of_cores))
    return CpuTimes(time.monotonic(), idle, time.process_time())


class Threads:
    """The number of torch threads of this process. A training pass calls `begin` before its first
    micro-batch and `adapt` after each of them. Forward passes alone are faster, so they would spoil
    the comparison. They use the number that training has chosen."""

    def __init__(
        self,
        setting: int | Literal["auto"],
        most: int | None = None,
        times: Callable[[], CpuTimes] = cpu_times,
    ) -> None:
        """
        Args:
            setting: `learner.num_threads`. A number stays fixed.
            most: largest number of threads; default: `usable_cpus()`.
        """
        self.auto = setting == "auto"
        self.count = 1 if setting == "auto" else setting
        self._most = most or usable_cpus()
        self._times, self._before = times, times()
        self._seconds = self._free = 0.0
        """Seconds of passes since the last choice, and the core-seconds that were free in them."""
        self._tokens = self._choices = 0
        """Tokens since the last choice, and choices so far."""
        self._tried: dict[int, tuple[float, int]] = {}
        """Number of threads → mean tokens per second, and choices so far when it was used last."""
        torch.set_num_threads(self.count)

    def begin(self) -> None:
        """Leave out the time until now. The learner waited in it, or did something else."""
        if self.auto:
            self._before = self._times()

    def adapt(self, tokens: int) -> None:
        """Choose the number of threads for the next micro-batches: at most one for each core that
        was free in passes since the last choice (see MOST_USED).

        Args:
            tokens: of the micro-batch that has just ended.
        """
        if not self.auto:
            return
        now, then = self._times(), self._before
        self._before = now
        self._seconds += now.clock - then.clock
        self._free += now.idle - then.idle + now.own - then.own
        self._tokens += tokens
        if self._seconds < SHORTEST_S:
            return
        rate = self._tokens / self._seconds
        before, _ = self._tried.get(self.count, (rate, 0))
        self._tried[self.count] = NEW * rate + (1 - NEW) * before, self._choices
        free = int(self._free / self._seconds + MOST_USED)
        self._seconds, self._free, self._tokens = 0.0, 0.0, 0
        self._choices += 1
        count = self._fastest(max(1, min(self._most, free)))
        if count != self.count:
            self.count = count
            torch.set_num_threads(count)

    def _fastest(self, most: int) -> int:
        """1, 2, 4, … or `most` threads: one that was not tried yet, one beside the fastest that was
        not tried for AGAIN choices, or else the fastest."""
        counts = sorted({most, *(1 << power for power in range(most.bit_length()))})
        for count in counts:
            if count not in self._tried:
                return count
        fastest = max(counts, key=lambda count: self._tried[count][0])
        at = counts.index(fastest)
        for count in (*counts[max(0, at - 1) : at], *counts[at + 1 : at + 2]):
            if self._choices - self._tried[count][1] > AGAIN:
                return count
        return fastest
