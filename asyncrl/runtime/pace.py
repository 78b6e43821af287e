"""How often a process sends what is ready."""

from __future__ import annotations

import math
import time


class Pace:
    """Spaces the messages of one sender. After a quiet time a message goes at once. Under load,
    what is ready waits until `every_s` seconds after the last message, and travels together."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._last = -math.inf

    def left_s(self) -> float:
        """Seconds until the next message should go, at least 0."""
        return max(0.0, self._last + self._every_s - time.monotonic())

    def sent(self) -> None:
        """Note that a message is sent now."""
        self._last = time.monotonic()
