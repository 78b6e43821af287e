"""An environment whose model runs Python programs in a sandbox."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from asyncrl.environments.ready.graded import Grade, first_messages, graded
from asyncrl.environments.tools import run_tools
from asyncrl.sandbox import (
    Limits,
    Program,
    Result,
    Sandbox,
    SandboxError,
    SandboxUnavailableError,
    open_sandbox,
)
from asyncrl.sandbox.machine import usable_cpus
from asyncrl.text.chat_messages import Schema

RUN_PYTHON: Schema = {
    "type": "function",
    "function": {
        "name": "run_python",
        "description": (
            "Run a Python program, and get what it prints. Each call is a program of its own."
        ),
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program's source."}},
            "required": ["code"],
        },
    },
}
WALL_S = 10.0
"""Seconds of a program, unless `limits` says otherwise."""
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def python(
    task: Mapping[str, Any],
    model: Any,
    level: str = "namespaces",
    service: str | None = None,
    limits: Mapping[str, Any] | None = None,
    output_characters: int = 2000,
    grade: Grade = "math",
    system: str | None = None,
    most_turns: int = 8,
    sandbox: Sandbox | None = None,
) -> dict[str, float]:
    """A task whose model may call `run_python(code)`. An answer without a call is the final one.
    The reward is 1.0 if it agrees with the column `answer`, else 0.0.

    Programs run in `asyncrl.sandbox`, never in the environment's process.

    Args:
        level: least level of the sandbox. docs/how_to/sandbox.md compares them.
        service: URL of a sandbox service that runs the programs. None: this machine does.
        limits: fields of `asyncrl.sandbox.Limits`, such as {"wall_s": 5}.
        output_characters: characters of standard output, and of standard error, that the model
            gets.
        grade, system, most_turns: as for `calculator`.
        sandbox: runs the programs, instead of `level` and `service`.

    Raises:
        SandboxError: the level is not available, or a program could not be run. It is not the
            model's fault, so the session ends with env_error.
    """
    bounds = Limits(**{"wall_s": WALL_S, **(limits or {})})
    box = await asyncio.to_thread(_opened, level, service) if sandbox is None else sandbox
    broken: list[SandboxError] = []

    async def run_python(code: str) -> str:
        async with _slot():
            try:
                result = await box.run_async(Program.python(str(code)), bounds)
            except SandboxError as error:
                broken.append(error)
                raise
        return result_text(result, output_characters)

    tools = {"run_python": (RUN_PYTHON, run_python)}
    done = await run_tools(model, first_messages(task, system), tools, most_turns)
    if broken:
        raise broken[0]
    return done.parts() | await graded(task, done.answer, grade, not done.cut)


@functools.cache
def _opened(level: str, service: str | None) -> Sandbox:
    try:
        return open_sandbox(level, service=service)
    except SandboxUnavailableError as error:
        raise SandboxUnavailableError(
            f"{error}; set level or service in environment.arguments"
        ) from None


def _slot() -> asyncio.Semaphore:
    """Programs that run at once: as many as there are usable processors."""
    loop = asyncio.get_running_loop()
    return _slots.setdefault(loop, asyncio.Semaphore(usable_cpus()))


def result_text(result: Result, most: int) -> str:
    """What the model gets: standard output, standard error, and how the program ended unless it
    exited with code 0. Of long output it gets the beginning, and of long errors the end.

    Args:
        most: characters of each.
    """
    output, errors = result.stdout, result.stderr
    if len(output) > most:
        output = f"{output[:most]}… ({len(output) - most} more characters)"
    if len(errors) > most:
        errors = f"({len(errors) - most} characters before) …{errors[-most:]}"
    parts = [output.rstrip("\n")] if output.strip() else []
    if errors.strip():
        parts.append(f"standard error:\n{errors.rstrip()}")
    if result.status != "exited":
        parts.append(f"the program was ended: {ENDS.get(result.status, result.status)}")
    elif result.exit_code:
        parts.append(f"exit code {result.exit_code}")
    return "\n".join(parts) or "the program printed nothing"


ENDS = {
    "wall": "it took too long",
    "cpu": "it took too much processor time",
    "memory": "it used too much memory",
    "processes": "it had too many processes",
    "disk": "it wrote too much to files",
    "files": "it made too many files",
    "output": "it printed too much",
    "signaled": "by a signal",
}
"""Status of a sandbox's result → words for the model."""
