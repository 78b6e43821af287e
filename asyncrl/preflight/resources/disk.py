"""Free space on the disks of a run, checked before the start because a full disk would end
the run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import ConfigError, RunSettings
from asyncrl.preflight.resources.adapter import trained_bytes

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Disk:
    """The space that a run needs on one file system."""

    directories: tuple[Path, ...]
    """The run's directories on this file system."""
    needed: int
    """Bytes still to be written for checkpoints and models. Trajectories and metrics are small and
    not counted."""
    free: int
    """Free bytes."""


def disk_text(disks: Sequence[Disk]) -> str:
    """Needed and free space of each file system."""
    lines = [
        f"  {' and '.join(map(str, disk.directories))}: needed {disk.needed / MIB:,.1f} MiB,"
        f" free {disk.free / MIB:,.0f} MiB"
        for disk in disks
    ]
    return "\n".join(["# disk, for checkpoints and exported models", *lines])


def checkpoint_bytes(config: RunSettings, version_bytes: int) -> int:
    """Bytes of one checkpoint: trained weights in float32, and AdamW's two moments.

    Args:
        version_bytes: bytes of the whole model in model.dtype.
    """
    return trained_bytes(config, version_bytes, 4 + 4 * config.learner.optimizer.moments)


def disks(config: RunSettings, version_bytes: int) -> tuple[Disk, ...]:
    """The file systems of the run directory and of `checkpoint.save`. All nodes of the learner
    share them, which a probe at the start verifies.

    Args:
        version_bytes: bytes of one published version.

    Raises:
        ConfigError: see `RunSettings.run_directory`.
    """
    models = version_bytes * (2 if config.keeps_snapshot else 1)
    reference = version_bytes if config.reference_interval else 0
    wanted = (
        # A refresh writes the reference policy's next version before it deletes the last one.
        (config.run_directory, models + 2 * reference),
        (
            config.checkpoints_directory,
            _checkpoints_at_most(config) * (checkpoint_bytes(config, version_bytes) + reference),
        ),
    )
    found: dict[int, Disk] = {}
    for directory, most in wanted:
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


def refuse_full(config: RunSettings, found: Sequence[Disk]) -> None:
    """Raise ConfigError if a disk has less free space than the run needs."""
    for disk in found:
        if disk.needed > disk.free:
            raise ConfigError(
                f"{disk.directories[0]} has {disk.free // MIB:,} MiB free, but up to"
                f" {_checkpoints_at_most(config)} checkpoints and the exported model need"
                f" {disk.needed / MIB:,.1f} MiB; free some space, lower checkpoint.keep ="
                f" {config.checkpoint.keep}, or set runs_root to a larger disk"
            )


def _checkpoints_at_most(config: RunSettings) -> int:
    """Checkpoints on the disk at once: one more than are kept, because the next one is written
    first. Never more than the run creates."""
    every = config.checkpoint.every_steps
    made = -(-config.last_step // every) if every else 1
    return min(made, config.checkpoint.keep + 1)


def _nearest(directory: Path) -> Path:
    return next(path for path in (directory, *directory.parents) if path.is_dir())


def _bytes_below(directory: Path) -> int:
    """Bytes of existing files. In a resumed run, new checkpoints replace the older ones."""
    return sum(
        _bytes_of(os.path.join(folder, name))
        for folder, _, names in os.walk(directory)
        for name in names
    )


def _bytes_of(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:  # the run may still be active, which a later check finds
        return 0
