"""What a sandbox promises: its levels, its limits, a program, its result, and the protocol."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

Status = Literal[
    "exited", "signaled", "wall", "cpu", "memory", "processes", "disk", "files", "output"
]
"""How a program ended: it exited, a signal ended it, or it exceeded the limit of that name."""


class SandboxError(RuntimeError):
    """A program could not be run in a sandbox, or its sandbox broke. The program's own failures are
    results."""


class SandboxUnavailableError(SandboxError):
    """The requested level is not available here. The message says why, level by level."""


class Level(StrEnum):
    """What separates a program from the machine, weakest first. docs/how_to/sandbox.md compares
    them."""

    LANDLOCK = "landlock"
    """Landlock and seccomp restrict access to the machine's files and processes."""
    NAMESPACES = "namespaces"
    """Separate users, processes, mounts, network and IPC, and the seccomp filter."""
    CONTAINER = "container"
    """A separate machine or container. Only a service (`sandbox.service`) offers this level."""

    def reaches(self, asked: Level) -> bool:
        """Whether this level is at least `asked`."""
        order = list(Level)
        return order.index(self) >= order.index(asked)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use, including all processes that it starts.

    Raises:
        ValueError: A limit is not a finite number above 0.
    """

    wall_s: float = 10.0
    """Seconds of wall-clock time."""
    cpu_s: float = 10.0
    """Seconds of processor time."""
    memory_bytes: int = 1 << 30
    """Address space of each process, and memory of all of them together."""
    processes: int = 32
    """Processes and threads at once."""
    disk_bytes: int = 64 << 20
    """Bytes in its folder."""
    files: int = 1024
    """Files and folders in its folder."""
    open_files: int = 64
    """Open files of one process."""
    output_bytes: int = 1 << 20
    """Bytes on standard output, and on standard error."""

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if (
                not isinstance(value, int | float)
                or isinstance(value, bool)
                or not math.isfinite(value)
                or value <= 0
            ):
                raise ValueError(f"sandbox limit {name} = {value!r} is not a number above 0")


@dataclass(frozen=True, slots=True)
class Program:
    """What to run: a command, its standard input, and the files in its folder at the start.

    Raises:
        ValueError: The command is empty or contains NUL, or a file name leads out of the folder.
    """

    argv: tuple[str, ...]
    """The first word `python` means the sandbox's own interpreter."""
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Name relative to the folder, such as "data/a.txt" → content."""

    def __post_init__(self) -> None:
        if not self.argv or not self.argv[0] or any("\0" in word for word in self.argv):
            raise ValueError(
                f"argv = {self.argv!r} is not a command; give at least one word, without NUL"
            )
        for name in self.files:
            if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
                raise ValueError(
                    f"file name {name!r} is not a plain relative path; use one such as 'data/a.txt'"
                )

    @staticmethod
    def python(
        source: str, stdin: bytes | str = b"", files: Mapping[str, bytes | str] | None = None
    ) -> Program:
        """A program that runs Python source as `main.py`, which may import the other files."""
        given = {name: _bytes(content) for name, content in (files or {}).items()}
        return Program(
            ("python", "-s", "-B", "main.py"), _bytes(stdin), {"main.py": _bytes(source), **given}
        )


def _bytes(text: bytes | str) -> bytes:
    """The text as UTF-8. A model's text may contain lone surrogates, which are replaced."""
    return text.encode(errors="replace") if isinstance(text, str) else text


@dataclass(frozen=True, slots=True)
class Result:
    """How a program ended."""

    status: Status
    exit_code: int | None
    """Exit code, or minus the signal that ended the program; None if a limit ended it."""
    stdout: str
    """At most `output_bytes`. Bytes that are not UTF-8 are replaced."""
    stderr: str
    seconds: float
    """Wall-clock time since the program's start."""
    cpu_s: float
    """Processor time of the program and all that it started, as far as the sandbox saw."""
    memory_bytes: int
    """Highest memory use that was observed."""
    level: Level

    @property
    def ok(self) -> bool:
        """Whether the program exited with code 0."""
        return self.status == "exited" and self.exit_code == 0


class Sandbox(Protocol):
    """Runs untrusted programs. `asyncrl.testing.FakeSandbox` is a fake that runs nothing."""

    @property
    def level(self) -> Level:
        """The level that a self-test proved, or that the service reports."""
        ...

    def run(self, program: Program, limits: Limits = ...) -> Result:
        """Run the program to its end. Raises SandboxError if the program did not run, or its end is
        unknown."""
        ...

    async def run_async(self, program: Program, limits: Limits = ...) -> Result:
        """`run`, without blocking the event loop. Cancellation kills a program on this machine."""
        ...
