"""The batch sizes of a run on a dataset that is resumed with another one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from asyncrl.algorithms.schedules import BatchSizes
from asyncrl.config import OfflineConfig
from asyncrl.rundir.record import RECORD, AttemptRecord, read_record
from asyncrl.rundir.resume import find_beginning


def batch_sizes(config: OfflineConfig) -> BatchSizes:
    """The batch size of each applied step: those of the earlier attempts that the run continues,
    then `batch_size`.

    Raises:
        ConfigError: the run cannot be resumed.
    """
    directory = _continued(config)
    record = None if directory is None else read_record(directory)
    attempts = [] if record is None else record["attempts"]
    if all(attempt["groups_per_step"] == config.batch_size for attempt in attempts):
        return ((0, config.batch_size),)
    own = record is not None and directory == config.run_directory
    state = find_beginning(config, record["run_id"] if record is not None and own else None).state
    if state is None:
        return ((0, config.batch_size),)
    before = [size for size in _of_line(attempts, state.attempt) if size[0] < state.version]
    return (*before, (state.version, config.batch_size))


def _continued(config: OfflineConfig) -> Path | None:
    """Directory of the run whose checkpoint this run continues from; None if it has no record of
    its attempts."""
    if config.resume != "never" and (config.run_directory / RECORD).exists():
        return config.run_directory
    load = config.checkpoint.load
    folders = [] if load is None else [Path(load), Path(load).parent]
    return next((folder for folder in folders if (folder / RECORD).exists()), None)


def _of_line(attempts: Sequence[AttemptRecord], last: int) -> BatchSizes:
    """The batch sizes of the line of attempts that leads to `last`."""
    sizes: list[tuple[int, float]] = []
    attempt = attempts[last]
    sizes.append((attempt["version"], attempt["groups_per_step"]))
    while (before := attempt["from_attempt"]) is not None:
        attempt = attempts[before]
        sizes.append((attempt["version"], attempt["groups_per_step"]))
    if attempt["version"]:  # the first one began with another run's checkpoint
        sizes.append((0, attempt["frontier"] / attempt["version"]))
    return tuple(reversed(sizes))
