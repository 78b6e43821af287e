"""The run directory: its lock, its files, and reading it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.rundir.directory import RunDirectory as RunDirectory
    from asyncrl.rundir.reader import (
        Run as Run,
        RunNotFoundError as RunNotFoundError,
        open_run as open_run,
    )

__getattr__ = lazy_exports(
    __name__,
    open_run="reader",
    Run="reader",
    RunDirectory="directory",
    RunNotFoundError="reader",
)
