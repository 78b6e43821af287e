"""The environment whose code is an agent: a program or a function that talks to its session at the
session's URL. `environment.agent` or `environment.command` names it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import site
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import psutil

from asyncrl.environments.model import Model
from asyncrl.environments.results import OUTPUT
from asyncrl.environments.running import AgentFailedError
from asyncrl.environments.threads import in_thread
from asyncrl.runtime.files.temporary import TemporaryFolder
from asyncrl.runtime.functions import import_function, is_async, short
from asyncrl.runtime.imports import SAFE, SAFE_PATH
from asyncrl.runtime.loopback import without_proxy_on_loopback
from asyncrl.runtime.redact import is_secret_name

COLUMN = re.compile(r"\{(\w+)\}")
"""In an argument of a command: the name of a column of the task."""
MOST_KEPT = 1 << 16
"""Bytes of a program's output that are kept, from its end."""
END_S, LOOK_AGAIN_S = 2.0, 0.01
"""Seconds that a program gets to end after SIGTERM, and between two looks for what it has left."""
NOT_PASSED = ("RAY_", "ASYNCRL_", "OPENAI_", "ANTHROPIC_")
"""Prefixes of variables that an agent does not get from this process."""
MARK = "ASYNCRL_SESSION_FOLDER"
"""Variable of a program and of all that it starts: the folder of its session."""
OWN_FOLDERS = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")
"""Variables with folders that are by default in HOME. A program does not get them from this
process, so that its own HOME counts."""


async def play(
    task: Mapping[str, Any],
    model: Model,
    *,
    command: Sequence[str] | None = None,
    function: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    variables: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> object:
    """One session of an agent. The arguments are those of `environment`.

    Returns:
        Of a program: its standard output, as `{"output": text}`. Of a function: what it returned.

    Raises:
        AgentFailedError: the program cannot start, or its exit code is not 0.
    """
    if function is not None:
        return await _call(function, task, model, arguments or {})
    named = "prompt" in command_columns(command or ())
    given = _stdin(task, stdin or ("none" if named else "prompt"))
    argv = _filled(command or (), task)
    async with _folder() as folder:
        own = {**own_folder(folder, os.environ), **(variables or {}), **model.variables}
        environment = program_environment(os.environ, {**own, MARK: str(folder)})
        try:
            return {OUTPUT: await _run(argv, given, environment)}
        finally:
            # A thread, because it looks at every process. A second cancellation does not stop it.
            await asyncio.shield(asyncio.to_thread(_end_marked, str(folder)))


def program_environment(process: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of a program: those of this process without its secrets, those of
    Ray and OWN_FOLDERS, and `variables`. No proxy is between the program and its session."""
    kept = {
        name: value
        for name, value in process.items()
        if not is_secret_name(name)
        and not name.startswith(NOT_PASSED)
        and name not in OWN_FOLDERS
        and (name, value) != (SAFE_PATH, SAFE)
    }
    return without_proxy_on_loopback({**kept, **variables})


def own_folder(folder: Path, process: Mapping[str, str]) -> dict[str, str]:
    """Variables that give a program a home and temporary files in a folder of its own. Caches and
    the user's Python packages stay those of this process: to fetch them again would take long."""
    home = Path(process.get("HOME") or Path.home())
    return {
        "HOME": str(folder),
        "TMPDIR": str(folder / "tmp"),
        "XDG_CACHE_HOME": process.get("XDG_CACHE_HOME") or str(home / ".cache"),
        "PYTHONUSERBASE": process.get("PYTHONUSERBASE") or site.getuserbase(),
    }


@contextlib.asynccontextmanager
async def _folder() -> AsyncIterator[Path]:
    """A folder of one session, among the temporary files of this process. It is removed in a
    thread, because it may be large, and also if the session is canceled again meanwhile."""
    folder = TemporaryFolder("session_")
    try:
        home = Path(folder.name)
        (home / "tmp").mkdir()
        yield home
    finally:
        await asyncio.shield(asyncio.to_thread(folder.cleanup))


def command_columns(command: Sequence[str]) -> list[str]:
    """The columns that a command names, such as `prompt` in `--task={prompt}`."""
    return sorted({name for argument in command for name in COLUMN.findall(argument)})


def _filled(command: Sequence[str], task: Mapping[str, Any]) -> list[str]:
    """The command with the values of the task's columns. A text with NUL bytes is no argument."""

    def value(found: re.Match[str]) -> str:
        name = found.group(1)
        if name not in task:
            raise KeyError(f"environment.command names {{{name}}}; the task has {sorted(task)}")
        given = task[name]
        return given if isinstance(given, str) else json.dumps(given, default=str)

    return [COLUMN.sub(value, argument).replace("\0", "") for argument in command]


def _stdin(task: Mapping[str, Any], kind: str) -> bytes:
    if kind == "none":
        return b""
    text = str(task["prompt"]) if kind == "prompt" else json.dumps(dict(task), default=str)
    return text.encode(errors="replace")


async def _run(argv: Sequence[str], given: bytes, environment: Mapping[str, str]) -> str:
    """Run a program to its end. Returns what it wrote. Its process group ends with it, also if the
    session is canceled."""
    # Files, not pipes: a process that the program leaves behind would keep a pipe open.
    with TemporaryFile() as stdin, TemporaryFile() as stdout, TemporaryFile() as stderr:
        stdin.write(given)
        stdin.seek(0)
        try:
            program = await asyncio.create_subprocess_exec(
                *argv,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=dict(environment),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise AgentFailedError(f"{argv[0]!r} cannot start: {error}") from None
        try:
            code = await program.wait()
        finally:
            await _end(program)
        if code:
            how = _signal_name(-code) if code < 0 else f"exit code {code}"
            said = _last_words(_last_text(stderr))
            raise AgentFailedError(f"{os.path.basename(argv[0])} ended with {how}{said}")
        return _last_text(stdout)


def _signal_name(number: int) -> str:
    known = {each.value: each.name for each in signal.Signals}
    return f"signal {known.get(number, number)}"


def _last_words(text: str) -> str:
    """The last line with a letter or a digit, after a colon."""
    lines = (line for line in reversed(text.splitlines()) if any(map(str.isalnum, line)))
    return "".join(f": {short(line.strip())}" for line in itertools.islice(lines, 1))


def _last_text(file: IO[bytes]) -> str:
    file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_KEPT))
    return file.read().decode(errors="replace")


async def _end(program: asyncio.subprocess.Process) -> None:
    """End a program and its process group, first with SIGTERM."""
    try:
        if program.returncode is None:
            _signal(program, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await program.wait()
    finally:  # also if the session is canceled again
        _signal(program, signal.SIGKILL)
    await program.wait()


def _signal(program: asyncio.subprocess.Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(program.pid, number)


def _end_marked(folder: str) -> None:
    """Kill what the program of a session has started and left, in whatever group or session of
    processes it is. This stops all of them first: one that starts others would outrun the kills."""
    ends = time.monotonic() + END_S
    while (left := _marked(folder)) and time.monotonic() < ends:
        for send in (psutil.Process.suspend, psutil.Process.kill):
            for process in left:
                with contextlib.suppress(psutil.Error):
                    send(process)
        time.sleep(LOOK_AGAIN_S)


def _marked(folder: str) -> list[psutil.Process]:
    """The living processes that have this folder as their MARK, among those below the supervisor,
    which adopts what a program leaves."""
    found = []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(os.getppid()).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and (
                    process.environ().get(MARK) == folder
                ):
                    found.append(process)
    return found


async def _call(
    function: str, task: Mapping[str, Any], model: Model, arguments: Mapping[str, Any]
) -> object:
    """Call an agent's function: async, or a blocking one in a thread."""
    found = import_function("environment.agent", function)
    if is_async(found):
        return await found(task, model, **arguments)
    return await in_thread(partial(found, task, model, **arguments))
