"""Whole runs: training, launching, evaluation, export and audit."""

from __future__ import annotations

from asyncrl.runtime.exports import lazy_exports

__getattr__ = lazy_exports(
    __name__,
    AcrossAttempts="attempts",
    RunFailedError="embedded",
    Summary="train",
    command_name="train",
    concurrency_of="attempt",
    launch_stations="launch",
    run_training="train",
)
