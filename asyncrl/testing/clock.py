"""An event loop on a virtual clock."""

from __future__ import annotations

import asyncio
import selectors

__all__ = ["DeadlockError", "VirtualTimeLoop"]

MOST_TURNS = 100_000
"""Turns of a virtual loop without time passing, after which it counts as stuck."""


class DeadlockError(RuntimeError):
    """Everything waits and no timer will ever wake anything, or everything turns in circles and no
    time passes."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer: hours of waiting take no time, and a
    deadlock is an error at once.

    It cannot see threads: nothing that runs on it may wait for one. Use it by
    `asyncio.Runner(loop_factory=VirtualTimeLoop)`.
    """

    def __init__(self) -> None:
        super().__init__(_VirtualSelector(self))
        self.now = 0.0

    def time(self) -> float:
        return self.now


class _VirtualSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self.loop = loop
        self.turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError(f"nothing can happen any more at {self.loop.now:g} s")
        self.turns = 0 if timeout > 0 else self.turns + 1
        if self.turns > MOST_TURNS:
            raise DeadlockError(
                f"{MOST_TURNS} turns of the loop at {self.loop.now:g} s, and no time has passed"
            )
        self.loop.now += timeout
        return super().select(0)
