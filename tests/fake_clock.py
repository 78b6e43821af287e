"""A clock that stands still, in the place of a module's `time`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class FakeClock:
    """`s` is the time that it shows."""

    s: float = 0.0

    def monotonic(self) -> float:
        return self.s
