"""An event loop on a virtual clock."""

from __future__ import annotations

import asyncio
import selectors

MOST_TURNS = 100_000
"""Iterations of a virtual loop without a change of time, after which it counts as stuck."""


class DeadlockError(RuntimeError):
    """Every task waits and no timer is set, or the loop iterates without a change of time."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer. Hours of waiting take no time, and a
    deadlock raises an error at once.

    The loop cannot see threads, so tasks on it must not wait for one. Use it as
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
            raise DeadlockError(f"every task waits and no timer is set at {self.loop.now:g} s")
        self.turns = 0 if timeout > 0 else self.turns + 1
        if self.turns > MOST_TURNS:
            raise DeadlockError(
                f"{MOST_TURNS} turns of the loop at {self.loop.now:g} s without a change of time"
            )
        self.loop.now += timeout
        return super().select(0)
