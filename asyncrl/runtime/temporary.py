"""Temporary folders that go with the process that made them, however it ended: the next one to make such a folder removes those of dead processes."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import psutil

__all__ = ["temporary_folder"]


def temporary_folder(kind: str) -> tempfile.TemporaryDirectory[str]:
    """A new folder `asyncrl_KIND_PROCESS_START_…` in the temporary directory, after those of this kind are removed whose processes are gone.

    Args:
        kind: letters and hyphens.
    """
    place = Path(tempfile.gettempdir())
    for old in place.glob(f"asyncrl_{kind}_*"):
        named = re.fullmatch(rf"asyncrl_{re.escape(kind)}_([0-9]+)_([0-9]+)_\w+", old.name)
        if named and not old.is_symlink() and not _lives(int(named[1]), int(named[2])):
            shutil.rmtree(old, ignore_errors=True)  # somebody else's stays
    this = psutil.Process()
    return tempfile.TemporaryDirectory(prefix=f"asyncrl_{kind}_{this.pid}_{int(this.create_time())}_", dir=place)


def _lives(process: int, started: int) -> bool:
    """Whether a process that started in this second since the epoch still lives: ids are used again."""
    try:
        found = psutil.Process(process)
        return int(found.create_time()) == started and found.status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:
        return False
