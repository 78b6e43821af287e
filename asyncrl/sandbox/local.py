"""Sandboxes on this machine: the levels that it supports, and how to open and use a sandbox."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.sandbox.job import Job, result_from
from asyncrl.sandbox.levels import (
    Level,
    Limits,
    Program,
    Result,
    Sandbox,
    SandboxError,
    SandboxUnavailableError,
)

PACKAGES = Path(__file__).parents[2]
SUPERVISOR = (
    f"import sys; sys.path.append({str(PACKAGES)!r}); from asyncrl.sandbox.supervisor import main;"
    " main()"
)
GRACE_S = 30.0
"""Seconds beyond a program's own for making and removing its sandbox."""
MOST_ANSWER = 1 << 16
"""Bytes of a supervisor's answer, in addition to the output, which JSON may make six times as long.
"""
NEVER_SHOWN = ("/", "/proc", "/sys", "/dev", "/run", "/var/run", "/etc", "/tmp", "/root", "/home")
"""Folders that `paths` may not contain; folders below some of them are allowed."""

SELF_TEST = """
import os, socket, sys
def refused(act):
    try:
        act()
    except OSError:
        return True
    return False
canary = sys.stdin.read()
assert refused(lambda: open(canary)), "a file of the host can be read"
written = os.path.dirname(canary) + "/written"
assert refused(lambda: open(written, "w")), "the host can be written to"
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
    assert refused(lambda: socket.socket(family)), "a socket can be opened"
assert refused(lambda: os.kill(os.getppid(), 0)) or os.getppid() <= 1, "the warden can be signaled"
assert "CANARY" not in os.environ, "the environment is the host's"
open("own", "w").close()
print("confined")
"""
"""A level must pass this before any other program runs at it. The tests try far more."""


@dataclass(frozen=True, slots=True)
class Levels:
    """The levels that a machine supports, and why it does not support others."""

    reached: tuple[Level, ...]
    reasons: Mapping[Level, str]
    """Level that is not supported → why."""

    @property
    def best(self) -> Level | None:
        """The strongest level that is supported; None if nothing may run here."""
        return max(self.reached, key=list(Level).index, default=None)

    def text(self) -> str:
        """A line for each level that needs no service, strongest first."""
        local = (Level.NAMESPACES, Level.LANDLOCK)
        return "\n".join(
            f"{level:<11} {'yes' if level in self.reached else 'no: ' + self.reasons[level]}"
            for level in local
        )


class LocalSandbox:
    """`Sandbox` on this machine, at exactly one level. Each program costs about 0.15 s of
    additional processor time."""

    def __init__(
        self, level: Level, *, python: str | None = None, paths: Sequence[str] = ()
    ) -> None:
        """Create a sandbox without testing that the level works here, as `open_sandbox` does.

        Args:
            python: Interpreter for programs. Default: this one, without its environment's
                packages.
            paths: Folders that programs may read and import from.

        Raises:
            ValueError: A path does not exist, or shows too much.
        """
        if level == Level.CONTAINER:
            raise ValueError("level 'container' needs an outside service: set sandbox.service")
        self.level = level
        self._python = os.path.realpath(python or sys.executable)
        self._imports = tuple(_checked_path(path) for path in paths)

    def run(self, program: Program, limits: Limits | None = None) -> Result:
        """Run the program to its end.

        Raises:
            SandboxError: The program did not run, or its end is unknown.
        """
        return _Running(self._job(program, limits or Limits())).result()

    async def run_async(self, program: Program, limits: Limits | None = None) -> Result:
        """`run` in a thread. Cancellation kills the program."""
        running = _Running(self._job(program, limits or Limits()))
        try:
            return await asyncio.to_thread(running.result)
        except asyncio.CancelledError:
            running.cancel()
            raise

    def _job(self, program: Program, limits: Limits) -> Job:
        prefix = str(Path(self._python).parents[1])
        argv = (self._python, *program.argv[1:]) if program.argv[0] == "python" else program.argv
        paths = self._imports if prefix == "/" else (prefix, *self._imports)
        base = os.path.realpath(tempfile.gettempdir())
        return Job(
            self.level, argv, program.stdin, program.files, limits, paths, self._imports, base
        )


class _Running:
    """A running supervisor. Its standard input is a pipe from this process, so it ends when this
    process does."""

    def __init__(self, job: Job) -> None:
        self._job = job
        # No environment, which could be read in /proc. No site-packages.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", SUPERVISOR],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            cwd="/",
            start_new_session=True,
        )

    def result(self) -> Result:
        with self._process as process:
            try:
                answer, errors = self._talk()
            finally:
                self.cancel()
                try:
                    process.wait(GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        try:
            tree = json.loads(answer)
        except ValueError:
            last_line = errors.decode(errors="replace").strip().splitlines()[-1:] or [
                f"exit code {process.returncode}"
            ]
            raise SandboxError(
                f"the sandbox's supervisor ended without a result: {last_line[0]}"
            ) from None
        return result_from(tree)

    def cancel(self) -> None:
        """Have the supervisor end everything. Safe to call from any thread."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.close()
        except OSError:
            return

    def _talk(self) -> tuple[bytes, bytes]:
        """Send the job; return the answer and the text on standard error."""
        process, limits = self._process, self._job.limits
        assert (
            process.stdin is not None and process.stdout is not None and process.stderr is not None
        )
        try:
            process.stdin.write(self._job.dump())
            process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # it died or was canceled, which the missing answer shows
        parts = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
        most = MOST_ANSWER + 12 * limits.output_bytes
        poll = select.poll()
        for descriptor in parts:
            poll.register(descriptor, select.POLLIN)
        deadline, waiting = time.monotonic() + limits.wall_s + GRACE_S, set(parts)
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                raise SandboxError(
                    f"the sandbox's supervisor gave no result in {limits.wall_s + GRACE_S:g} s"
                )
            for descriptor, _ in poll.poll(1000 * left):
                part = os.read(descriptor, 1 << 16)
                parts[descriptor] += part
                if len(parts[descriptor]) > most:
                    raise SandboxError(
                        "the sandbox's supervisor sent more than a result can contain"
                    )
                if not part:
                    poll.unregister(descriptor)
                    waiting.remove(descriptor)
        answer, errors = map(bytes, parts.values())
        return answer, errors


def _checked_path(path: str) -> str:
    real = os.path.realpath(path)
    if not os.path.isdir(real):
        raise ValueError(f"sandbox path {path!r} is not a folder here; name one that exists")
    if ":" in real:
        raise ValueError(
            f"sandbox path {path!r} has a colon, which PYTHONPATH does not allow; use another"
            " folder"
        )
    if real in NEVER_SHOWN or any(
        real.startswith(f"{other}/") for other in ("/proc", "/sys", "/dev")
    ):
        raise ValueError(
            f"sandbox path {path!r} would expose far more than programs need; name a folder"
            " below it"
        )
    return real


@functools.cache
def probe(python: str | None = None, paths: tuple[str, ...] = ()) -> Levels:
    """Test each level on this machine, with a small program that tries to escape. Takes about
    0.5 s, once per process."""
    reasons: dict[Level, str] = {}
    for level in (Level.NAMESPACES, Level.LANDLOCK):
        if reason := _refusal(LocalSandbox(level, python=python, paths=paths)):
            reasons[level] = reason
    reached = tuple(level for level in (Level.LANDLOCK, Level.NAMESPACES) if level not in reasons)
    return Levels(reached, reasons)


def _refusal(sandbox: LocalSandbox) -> str | None:
    """Why this level does not work here; None if it works."""
    if sys.platform != "linux":
        return f"the system is {sys.platform}, and sandboxes need Linux"
    with tempfile.TemporaryDirectory(prefix="asyncrl-canary-") as folder:
        # Every user may write here, so that only the sandbox can prevent it.
        os.chmod(folder, 0o777)
        canary = Path(folder, "canary")
        canary.write_text("readable")
        canary.chmod(0o644)
        try:
            result = sandbox.run(Program.python(SELF_TEST, str(canary)), Limits(wall_s=20.0))
        except SandboxError as error:
            return str(error)
        written = Path(folder, "written").exists()
    if result.ok and result.stdout == "confined\n" and not written:
        return None
    last_line = result.stderr.strip().splitlines()[-1:] or [result.status]
    return f"its self-test failed ({last_line[0]})"


def open_sandbox(
    level: Level | str = Level.NAMESPACES,
    *,
    service: str | None = None,
    python: str | None = None,
    paths: Sequence[str] = (),
) -> Sandbox:
    """Open the strongest sandbox that is available, at least `level`.

    Args:
        service: URL of a sandbox service that runs the programs; None = this machine runs them.
        python, paths: See `LocalSandbox`.

    Raises:
        SandboxUnavailableError: The level is not available.
        ValueError: The level is unknown, or a path may not be shown.
    """
    required = Level(level)
    if service is not None:
        from asyncrl.sandbox.service import ServiceSandbox

        outside = ServiceSandbox(service)
        if not outside.level.reaches(required):
            raise SandboxUnavailableError(
                f"sandbox level {required.value!r} is required, and the service at {service} has"
                f" {outside.level.value!r}"
            )
        return outside
    levels = probe(python, tuple(paths))
    best = levels.best
    if best is None or not best.reaches(required):
        why = "; ".join(f"{name.value}: {reason}" for name, reason in levels.reasons.items())
        hint = (
            "only a service offers it: set sandbox.service" if required == Level.CONTAINER else why
        )
        raise SandboxUnavailableError(
            f"sandbox level {required.value!r} is not available here ({hint})"
        )
    return LocalSandbox(best, python=python, paths=paths)


def run(
    code: str | Sequence[str],
    *,
    stdin: bytes | str = b"",
    files: Mapping[str, bytes | str] | None = None,
    limits: Limits | None = None,
    level: Level | str = Level.NAMESPACES,
) -> Result:
    """Run Python source (a string) or a command (a sequence) in a sandbox of at least `level`.

    Raises:
        SandboxError: The program did not run, or its end is unknown.
    """
    return open_sandbox(level).run(_program(code, stdin, files), limits or Limits())


async def run_async(
    code: str | Sequence[str],
    *,
    stdin: bytes | str = b"",
    files: Mapping[str, bytes | str] | None = None,
    limits: Limits | None = None,
    level: Level | str = Level.NAMESPACES,
) -> Result:
    """`run`, without blocking the event loop. Cancellation kills the program."""
    sandbox = await asyncio.to_thread(open_sandbox, level)
    return await sandbox.run_async(_program(code, stdin, files), limits or Limits())


def _program(
    code: str | Sequence[str], stdin: bytes | str, files: Mapping[str, bytes | str] | None
) -> Program:
    if isinstance(code, str):
        return Program.python(code, stdin, files)
    python = Program.python("", stdin, files)
    return Program(
        tuple(code),
        python.stdin,
        {
            name: content
            for name, content in python.files.items()
            if name != "main.py" or "main.py" in (files or {})
        },
    )
