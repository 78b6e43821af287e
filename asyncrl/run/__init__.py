"""Whole runs: training, launching, evaluation, export and audit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.run.attempt import concurrency_of as concurrency_of
    from asyncrl.run.attempts import AcrossAttempts as AcrossAttempts
    from asyncrl.run.embedded import RunFailedError as RunFailedError
    from asyncrl.run.launch import launch_stations as launch_stations
    from asyncrl.run.reference_pass import score_rows as score_rows
    from asyncrl.run.replay import Replayed as Replayed, replay_sessions as replay_sessions
    from asyncrl.run.supervise import Summary as Summary, command_name as command_name
    from asyncrl.run.train import run_training as run_training

__getattr__ = lazy_exports(
    __name__,
    score_rows="reference_pass",
    AcrossAttempts="attempts",
    Replayed="replay",
    RunFailedError="embedded",
    Summary="supervise",
    command_name="supervise",
    concurrency_of="attempt",
    launch_stations="launch",
    replay_sessions="replay",
    run_training="train",
)
