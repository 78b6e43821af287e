"""One run as text: what a caller hands to the supervisor, or to a service, and what comes back."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

from asyncrl.sandbox.levels import Level, Limits, Program, Result, SandboxError

__all__ = ["Job", "limits_from", "program_from", "program_to", "result_from", "result_to"]


@dataclass(frozen=True, slots=True)
class Job:
    """A program, where and how it runs."""

    level: str
    argv: tuple[str, ...]
    """The first word is a path, or a name that PATH has."""
    stdin: bytes
    files: Mapping[str, bytes]
    limits: Limits
    paths: tuple[str, ...]
    """Real paths that are readable inside, besides the system's."""
    imports: tuple[str, ...]
    """Of these the folders that Python finds packages in."""
    base: str
    """A folder that exists, for temporary folders and as a mount point."""

    def environment(self, folder: str) -> dict[str, str]:
        """All that the program finds in its environment."""
        named = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": folder,
            "TMPDIR": folder,
            "LANG": "C.UTF-8",
            "MALLOC_ARENA_MAX": "2",
        }
        return named | ({"PYTHONPATH": ":".join(self.imports)} if self.imports else {})

    def dump(self) -> bytes:
        """As one line."""
        tree = dataclasses.asdict(self) | program_to(Program(self.argv, self.stdin, self.files))
        return json.dumps(tree).encode() + b"\n"

    @staticmethod
    def load(line: bytes) -> Job:
        """From `dump`."""
        tree = json.loads(line)
        program, limits = program_from(tree), limits_from(tree["limits"])
        lists = {name: tuple(tree[name]) for name in ("paths", "imports")}
        return Job(
            tree["level"],
            program.argv,
            program.stdin,
            program.files,
            limits,
            base=tree["base"],
            **lists,
        )


class ProgramRecord(TypedDict):
    """A `Program` in JSON."""

    argv: list[str]
    stdin: str
    """Base64, as is the content of each file."""
    files: dict[str, str]


def program_to(program: Program) -> ProgramRecord:
    """For JSON."""
    files = {name: _text(content) for name, content in program.files.items()}
    return {"argv": list(program.argv), "stdin": _text(program.stdin), "files": files}


def program_from(tree: ProgramRecord) -> Program:
    """From `program_to`. Raises ValueError, KeyError, TypeError or AttributeError on anything
    else."""
    files = {str(name): base64.b64decode(content) for name, content in tree["files"].items()}
    return Program(tuple(map(str, tree["argv"])), base64.b64decode(tree["stdin"]), files)


def limits_from(tree: object) -> Limits:
    """Raises ValueError or TypeError on what are no limits."""
    if not isinstance(tree, Mapping):
        raise TypeError(f"limits are an object of names and numbers, not {type(tree).__name__}")
    return Limits(**tree)


def result_to(result: Result) -> dict[str, object]:
    """For JSON."""
    return dataclasses.asdict(result)


def result_from(tree: object) -> Result:
    """From `result_to`, or from a supervisor that failed.

    Raises:
        SandboxError: it failed, or this is no result.
    """
    if isinstance(tree, dict) and isinstance(tree.get("error"), str):
        raise SandboxError(tree["error"])
    try:
        if not isinstance(tree, dict):
            raise TypeError(f"it is a {type(tree).__name__}")
        return Result(**{**tree, "level": Level(tree["level"])})
    except (TypeError, KeyError, ValueError) as error:
        raise SandboxError(f"a sandbox answered with what is no result ({error})") from None


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
