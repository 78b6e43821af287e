"""Temporary folders that do not outlive their process, even a killed one. Creating such a folder
removes those of dead processes."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.process
import multiprocessing.resource_sharer
import os
import re
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil

from asyncrl.runtime.files.removal import remove_folder

OURS = re.compile(r"asyncrl_[A-Za-z-]+_([0-9]+)_([0-9]+)_\w+")
SHORT = Path("/tmp")
"""Parent of folders with sockets if the temporary directory's path is too long."""
SOCKET_PATH = 107
"""Maximum length of a Unix socket's path, in bytes."""
FOLDER_NAME = 48
"""Maximum length of a folder's name."""
SOCKET_NAME = 37
"""Length of a socket's name in a `ProcessTemporaryFolder`, with its slash: vLLM uses UUIDs."""
SHARER_S = 5.0
"""Seconds for multiprocessing's listener to stop."""


class TemporaryFolder:
    """A new folder, until `cleanup`, the end of a `with` block, or the end of the process. Unlike
    that of `tempfile`, its removal changes nothing outside it, and never fails: see
    `remove_folder`.

    Args:
        prefix: beginning of the folder's name.
        parent: parent directory. Default: the temporary directory.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        self.name = tempfile.mkdtemp(prefix=prefix, dir=parent)
        self._remove = weakref.finalize(self, remove_folder, Path(self.name))

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *error: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Remove the folder. May be called twice."""
        self._remove()


def temporary_folder(kind: str, parent: Path | None = None) -> TemporaryFolder:
    """Create a folder `asyncrl_KIND_PROCESS_START_…`, after removing those of dead processes.

    Args:
        kind: letters and hyphens.
        parent: parent directory. Default: the temporary directory.
    """
    parent = parent or Path(tempfile.gettempdir())
    remove_left_behind(parent)
    this = psutil.Process()
    return TemporaryFolder(f"asyncrl_{kind}_{this.pid}_{int(this.create_time())}_", parent)


@contextlib.contextmanager
def temporary_within(kind: str) -> Iterator[None]:
    """Collect the temporary folders that the block creates, as an import may do, in one folder that
    does not outlive this process."""
    folder = temporary_folder(kind)
    atexit.register(folder.cleanup)
    before, tempfile.tempdir = tempfile.tempdir, folder.name
    try:
        yield
    finally:
        tempfile.tempdir = before


def remove_left_behind(parent: Path | None = None) -> None:
    """Remove the folders of dead processes."""
    for old in (parent or Path(tempfile.gettempdir())).glob("asyncrl_*"):
        named = OURS.fullmatch(old.name)
        if named and not old.is_symlink() and not _lives(int(named[1]), int(named[2])):
            remove_folder(old)  # fails for other users' folders


class ProcessTemporaryFolder:
    """A folder for the temporary files and sockets of this process and its children. Libraries
    leave such files behind when a process is killed.

    The folder replaces the temporary directory until `close`, which restores that and removes the
    folder.
    """

    def __init__(self, kind: str) -> None:
        self._folder = temporary_folder(kind, self.where())
        self.path = Path(self._folder.name)
        # multiprocessing and its children look here for the folder of their sockets. Without it
        # they would create one that only a clean exit removes.
        self._settings: dict[str, str | None] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
        self._before = os.environ.get("TMPDIR"), tempfile.tempdir, self._settings.get("tempdir")
        os.environ["TMPDIR"] = tempfile.tempdir = self._settings["tempdir"] = self._folder.name

    @staticmethod
    def where() -> Path:
        """The temporary directory, or `SHORT` if its path is too long for sockets."""
        directory = Path(tempfile.gettempdir())
        longest = len(os.fsencode(directory)) + FOLDER_NAME + SOCKET_NAME
        return directory if longest <= SOCKET_PATH else SHORT

    def close(self) -> None:
        """Restore the temporary directory and remove the folder. May be called twice."""
        if os.environ.get("TMPDIR") == self._folder.name:
            variable, tempfile.tempdir, self._settings["tempdir"] = self._before
            os.environ.pop("TMPDIR") if variable is None else os.environ.update(TMPDIR=variable)
            with contextlib.suppress(OSError):  # the listener's folder is already gone
                multiprocessing.resource_sharer.stop(SHARER_S)
        self._folder.cleanup()


def _lives(process: int, started: int) -> bool:
    """Whether the process with this id and start time (Unix seconds) is alive. Ids are reused."""
    try:
        found = psutil.Process(process)
        return int(found.create_time()) == started and found.status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:
        return True
    except psutil.NoSuchProcess:
        return False
