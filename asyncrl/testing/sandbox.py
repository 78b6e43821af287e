"""A sandbox that runs nothing: for tests of what uses one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncrl.sandbox.levels import Level, Limits, Program, Result

__all__ = ["FakeSandbox", "ended"]


def ended(
    stdout: str = "", exit_code: int = 0, stderr: str = "", level: Level = Level.NAMESPACES
) -> Result:
    """The result of a program that exited."""
    return Result("exited", exit_code, stdout, stderr, 0.1, 0.1, 1 << 20, level)


class FakeSandbox:
    """`Sandbox` that asks a function what a program would have done, and keeps what it was
    given."""

    def __init__(
        self, answer: Callable[[Program], Result], level: Level = Level.NAMESPACES
    ) -> None:
        self.level = level
        self.programs: list[Program] = []
        self.limits: list[Limits] = []
        self._answer = answer

    def run(self, program: Program, limits: Limits | None = None) -> Result:
        """What the function says, which must be a result of this level."""
        self.programs.append(program)
        self.limits.append(limits or Limits())
        result = self._answer(program)
        if result.level != self.level:
            raise ValueError(
                f"a result of level {result.level.value!r} from a sandbox of level"
                f" {self.level.value!r}"
            )
        return result

    async def run_async(self, program: Program, limits: Limits | None = None) -> Result:
        """The same, after a turn of the loop."""
        await asyncio.sleep(0)
        return self.run(program, limits)
