"""The run directory: its lock, its files, and reading it."""

from __future__ import annotations

from asyncrl.runtime.exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    Run="reader",
    RunDirectory="directory",
    RunNotFoundError="reader",
    open_run="reader",
)
