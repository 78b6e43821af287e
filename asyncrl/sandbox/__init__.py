"""Running code that nobody trusts: what a model wrote, for rewards and tools.

    from asyncrl.sandbox import run
    run("print(6 * 7)", level="namespaces").stdout      # "42\\n", or an error: never less isolation

`python -m asyncrl.sandbox` prints what this machine reaches. Only the standard library is used.
"""

from __future__ import annotations

from asyncrl.sandbox.levels import (
    Level,
    Limits,
    Program,
    Result,
    Sandbox,
    SandboxError,
    SandboxUnavailableError,
)
from asyncrl.sandbox.local import Levels, LocalSandbox, open_sandbox, probe, run, run_async

__all__ = [
    "Level",
    "Levels",
    "Limits",
    "LocalSandbox",
    "Program",
    "Result",
    "Sandbox",
    "SandboxError",
    "SandboxUnavailableError",
    "open_sandbox",
    "probe",
    "run",
    "run_async",
]
