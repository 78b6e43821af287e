"""A fake sandbox that does not run programs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncrl.sandbox.levels import Level, Limits, Program, Result


def ended(
    stdout: str = "", exit_code: int = 0, stderr: str = "", level: Level = Level.NAMESPACES
) -> Result:
    """Make the result of a program that exited."""
    return Result("exited", exit_code, stdout, stderr, 0.1, 0.1, 1 << 20, level)


class FakeSandbox:
    """A `Sandbox` that gets results from a function, and records its programs and limits."""

    def __init__(
        self, answer: Callable[[Program], Result], level: Level = Level.NAMESPACES
    ) -> None:
        self.level = level
        self.programs: list[Program] = []
        self.limits: list[Limits] = []
        self._answer = answer

    def run(self, program: Program, limits: Limits | None = None) -> Result:
        """Return the function's result, which must have this sandbox's level."""
        self.programs.append(program)
        self.limits.append(limits or Limits())
        result = self._answer(program)
        if result.level != self.level:
            raise ValueError(
                f"the result has level {result.level.value!r}, but the sandbox has level"
                f" {self.level.value!r}"
            )
        return result

    async def run_async(self, program: Program, limits: Limits | None = None) -> Result:
        """Return the same as `run`, after one turn of the event loop."""
        await asyncio.sleep(0)
        return self.run(program, limits)
