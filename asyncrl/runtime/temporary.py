"""Temporary folders that go with the process that made them, however it ended: the next one to make
such a folder removes those of dead processes."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.process
import multiprocessing.resource_sharer
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["TemporaryPlace", "remove_left_behind", "temporary_folder", "temporary_within"]

OURS = re.compile(r"asyncrl_[A-Za-z-]+_([0-9]+)_([0-9]+)_\w+")
SHORT = Path("/tmp")
"""Where folders for sockets lie if the temporary directory's own name is too long."""
SOCKET_PATH = 107
"""Characters of the longest path that a Unix socket may have."""
FOLDER_NAME = 48
"""Characters of a folder's name, at most."""
SOCKET_NAME = 37
"""Characters of a socket's name in a `TemporaryPlace`, with its slash: vLLM's are UUIDs."""
SHARER_S = 5.0
"""Seconds that multiprocessing's listener gets to end."""


def temporary_folder(kind: str, place: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """A new folder `asyncrl_KIND_PROCESS_START_…` in the temporary directory, after those are
    removed whose processes are gone.

    Args:
        kind: letters and hyphens.
        place: where, instead.
    """
    place = place or Path(tempfile.gettempdir())
    remove_left_behind(place)
    this = psutil.Process()
    return tempfile.TemporaryDirectory(
        prefix=f"asyncrl_{kind}_{this.pid}_{int(this.create_time())}_", dir=place
    )


@contextlib.contextmanager
def temporary_within(kind: str) -> Iterator[None]:
    """Temporary folders that are made inside, as by an import, lie in one that goes with this
    process, killed or not."""
    folder = temporary_folder(kind)
    atexit.register(folder.cleanup)
    before, tempfile.tempdir = tempfile.tempdir, folder.name
    try:
        yield
    finally:
        tempfile.tempdir = before


def remove_left_behind(place: Path | None = None) -> None:
    """Remove such folders whose processes are gone."""
    for old in (place or Path(tempfile.gettempdir())).glob("asyncrl_*"):
        named = OURS.fullmatch(old.name)
        if named and not old.is_symlink() and not _lives(int(named[1]), int(named[2])):
            shutil.rmtree(old, ignore_errors=True)  # somebody else's stays


class TemporaryPlace:
    """A folder for all temporary files and sockets of this process, and of those that it starts:
    libraries leave theirs behind when they are killed.

    It takes the temporary directory's place until `close`, which puts that back and removes the
    folder.
    """

    def __init__(self, kind: str) -> None:
        self._folder = temporary_folder(kind, self.where())
        self.path = Path(self._folder.name)
        # multiprocessing finds the folder of its sockets here, and so do the processes that it
        # starts; else it makes one that only a clean end removes.
        self._settings: dict[str, str | None] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
        self._before = os.environ.get("TMPDIR"), tempfile.tempdir, self._settings.get("tempdir")
        os.environ["TMPDIR"] = tempfile.tempdir = self._settings["tempdir"] = self._folder.name

    @staticmethod
    def where() -> Path:
        """The temporary directory, or a shorter one."""
        place = Path(tempfile.gettempdir())
        return place if len(str(place)) + FOLDER_NAME + SOCKET_NAME <= SOCKET_PATH else SHORT

    def close(self) -> None:
        """May be called twice."""
        if os.environ.get("TMPDIR") == self._folder.name:
            variable, tempfile.tempdir, self._settings["tempdir"] = self._before
            os.environ.pop("TMPDIR") if variable is None else os.environ.update(TMPDIR=variable)
            with contextlib.suppress(OSError):  # its listener's folder is gone already
                multiprocessing.resource_sharer.stop(SHARER_S)
        self._folder.cleanup()


def _lives(process: int, started: int) -> bool:
    """Whether a process that started in this second since the epoch still lives: ids are used
    again."""
    try:
        found = psutil.Process(process)
        return int(found.create_time()) == started and found.status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:
        return False
