"""Room on the disks that a run writes to, looked at before anything starts: a disk that fills up
later ends the run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import Config, ConfigError
from asyncrl.weights.layout import ITEM_BYTES

__all__ = ["Disk", "checkpoint_bytes", "disks", "refuse_full"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Disk:
    """What a run holds at its most on one file system."""

    directories: tuple[Path, ...]
    """Of the run, on this file system."""
    needed: int
    """Bytes that are still to be written: checkpoints and models, without the trajectories and
    metrics, which are small beside them."""
    free: int
    """Bytes that are free."""


def checkpoint_bytes(config: Config, version_bytes: int) -> int:
    """Bytes of one checkpoint: weights in float32, and AdamW's two moments.

    Args:
        version_bytes: bytes of one published version.
    """
    return (
        version_bytes
        // ITEM_BYTES[config.model.dtype]
        * (12 if config.learner.optimizer == "adamw" else 4)
    )


def disks(config: Config, version_bytes: int) -> tuple[Disk, ...]:
    """The file systems of the run directory and of `checkpoint.save`. Every node of the learner
    sees the same ones: a probe at the start proves it.

    Args:
        version_bytes: bytes of one published version.

    Raises:
        ConfigError: as `Config.run_directory`.
    """
    models = version_bytes * (2 if config.warm_start.data is not None else 1)
    places = (
        (config.run_directory, models),
        (
            config.checkpoints_directory,
            _checkpoints_at_most(config) * checkpoint_bytes(config, version_bytes),
        ),
    )
    found: dict[int, Disk] = {}
    for directory, most in places:
        there = _nearest(directory)
        needed = most - (
            _bytes_below(directory) if directory == config.checkpoints_directory else 0
        )
        device = os.stat(there).st_dev
        before = found.get(device, Disk((), 0, shutil.disk_usage(there).free))
        found[device] = Disk(
            (*before.directories, directory), before.needed + max(needed, 0), before.free
        )
    return tuple(found.values())


def refuse_full(config: Config, found: Sequence[Disk]) -> None:
    """Raises ConfigError, which names directory, need and free bytes, if a disk has less than the
    run will need."""
    for disk in found:
        if disk.needed > disk.free:
            raise ConfigError(
                f"{disk.directories[0]} has {disk.free // MIB:,} MiB free on its file system, and"
                f" up to {_checkpoints_at_most(config)} checkpoints and the exported model need"
                f" {disk.needed / MIB:,.1f} MiB; free some room, lower checkpoint.keep ="
                f" {config.checkpoint.keep}, or set runs_root to a larger disk"
            )


def _checkpoints_at_most(config: Config) -> int:
    """One more than are kept, while the next is written; never more than the run makes."""
    every = config.checkpoint.every_steps
    made = -(-config.max_steps // every) if every else 1
    return min(made, config.checkpoint.keep + 1)


def _nearest(directory: Path) -> Path:
    return next(place for place in (directory, *directory.parents) if place.is_dir())


def _bytes_below(directory: Path) -> int:
    """Of a run that goes on: its older checkpoints go as new ones come."""
    return sum(
        _bytes_of(os.path.join(place, name))
        for place, _, names in os.walk(directory)
        for name in names
    )


def _bytes_of(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:  # the run may still go on, which is found out later
        return 0
