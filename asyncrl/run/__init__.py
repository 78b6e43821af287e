"""Whole runs: training, launching, evaluation, export and audit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncrl.runtime.exports import lazy_exports

if TYPE_CHECKING:
    from asyncrl.run.across_attempts import AcrossAttempts as AcrossAttempts
    from asyncrl.run.attempt import concurrency_of as concurrency_of
    from asyncrl.run.cluster.cluster import (
        ray_cluster as ray_cluster,
        shut_down_ray as shut_down_ray,
        start_local_ray as start_local_ray,
    )
    from asyncrl.run.embedded import RunFailedError as RunFailedError
    from asyncrl.run.launch import launch_stations as launch_stations
    from asyncrl.run.offline.reference_pass import score_rows as score_rows
    from asyncrl.run.replay import Replayed as Replayed, replay_sessions as replay_sessions
    from asyncrl.run.supervise import Summary as Summary, command_name as command_name
    from asyncrl.run.train import run_training as run_training

__getattr__ = lazy_exports(
    __name__,
    AcrossAttempts="across_attempts",
    command_name="supervise",
    concurrency_of="attempt",
    launch_stations="launch",
    ray_cluster="cluster.cluster",
    replay_sessions="replay",
    Replayed="replay",
    run_training="train",
    RunFailedError="embedded",
    score_rows="offline.reference_pass",
    shut_down_ray="cluster.cluster",
    start_local_ray="cluster.cluster",
    Summary="supervise",
)
