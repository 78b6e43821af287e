"""One run as JSON: what a caller sends to the supervisor or a service, and what it gets back."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

from asyncrl.sandbox.levels import Level, Limits, Program, Result, SandboxError


@dataclass(frozen=True, slots=True)
class Job:
    """A program, and where and how it runs."""

    level: str
    argv: tuple[str, ...]
    """The first word is a path, or a name on PATH."""
    stdin: bytes
    files: Mapping[str, bytes]
    limits: Limits
    paths: tuple[str, ...]
    """Real paths that are readable inside, in addition to the system's."""
    imports: tuple[str, ...]
    """The paths among `paths` from which Python imports packages."""
    base: str
    """An existing folder, for temporary folders and as a mount point."""

    def environment(self, folder: str) -> dict[str, str]:
        """The program's whole environment."""
        named = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": folder,
            "TMPDIR": folder,
            "LANG": "C.UTF-8",
            "MALLOC_ARENA_MAX": "2",
        }
        return named | ({"PYTHONPATH": ":".join(self.imports)} if self.imports else {})

    def dump(self) -> bytes:
        """Serialize as one line of JSON."""
        tree = dataclasses.asdict(self) | program_to(Program(self.argv, self.stdin, self.files))
        return json.dumps(tree).encode() + b"\n"

    @staticmethod
    def load(line: bytes) -> Job:
        """The inverse of `dump`."""
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
    """Convert to JSON values."""
    files = {name: _text(content) for name, content in program.files.items()}
    return {"argv": list(program.argv), "stdin": _text(program.stdin), "files": files}


def program_from(tree: ProgramRecord) -> Program:
    """The inverse of `program_to`. Raises ValueError, KeyError, TypeError or AttributeError on any
    other input."""
    files = {str(name): base64.b64decode(content) for name, content in tree["files"].items()}
    return Program(tuple(map(str, tree["argv"])), base64.b64decode(tree["stdin"]), files)


def limits_from(tree: object) -> Limits:
    """Limits from JSON values. Raises ValueError or TypeError if they are not valid."""
    if not isinstance(tree, Mapping):
        raise TypeError(f"limits must be an object, not {type(tree).__name__}")
    return Limits(**tree)


def result_to(result: Result) -> dict[str, object]:
    """Convert to JSON values."""
    return dataclasses.asdict(result)


def result_from(tree: object) -> Result:
    """The inverse of `result_to`.

    Raises:
        SandboxError: `tree` is an error, or not a result.
    """
    if isinstance(tree, dict) and isinstance(tree.get("error"), str):
        raise SandboxError(tree["error"])
    try:
        if not isinstance(tree, dict):
            raise TypeError(f"it is a {type(tree).__name__}")
        return Result(**{**tree, "level": Level(tree["level"])})
    except (TypeError, KeyError, ValueError) as error:
        raise SandboxError(f"a sandbox did not answer with a result ({error})") from None


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
