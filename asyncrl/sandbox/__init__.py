"""Runs untrusted code, such as code that a model wrote, for rewards and tools.

    from asyncrl.sandbox import run
    run("print(6 * 7)", level="namespaces").stdout      # "42\\n"; raises if there is no such level

`python -m asyncrl.sandbox` prints the levels that this machine supports. The package uses only the
standard library.
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
