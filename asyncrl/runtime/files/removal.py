"""Removes a folder that others have written: a program may leave a tree of any depth, with links
and without permissions."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

TRIES = 3
"""Passes over a folder into which something may still write."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def remove_folder(path: Path) -> bool:
    """Remove a folder and all that it contains, or what is there instead of it. Returns whether
    nothing is left; never raises OSError.

    Links are removed, never followed, and permissions change only of folders within it. Each folder
    is moved up before it is removed. So any depth needs two open files and no long path.
    """
    for _ in range(TRIES):
        with contextlib.suppress(OSError), _opened(str(path)) as folder:
            _empty(folder)
        with contextlib.suppress(OSError):
            os.rmdir(path)
        with contextlib.suppress(OSError):  # it is a file or a link now
            os.unlink(path)
        if not os.path.lexists(path):
            return True
    return False


def _empty(folder: int) -> None:
    """Remove what an open folder contains."""
    mark, numbers = uuid.uuid4().hex, itertools.count()
    left = collections.deque(_remove_files(folder))
    while left:
        name = left.popleft()
        with contextlib.suppress(OSError), _opened(name, folder) as inner:
            for deeper in _remove_files(inner):
                moved = f"{mark}{next(numbers)}"
                # To move a folder needs the right to write into it.
                with contextlib.suppress(OSError), _opened(deeper, inner):
                    os.rename(deeper, moved, src_dir_fd=inner, dst_dir_fd=folder)
                    left.append(moved)
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=folder)


def _remove_files(folder: int) -> list[str]:
    """Remove all but folders from an open folder. Returns the names of the folders."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
                continue
            with contextlib.suppress(OSError):
                os.unlink(entry.name, dir_fd=folder)
    return folders


@contextlib.contextmanager
def _opened(name: str, within: int | None = None) -> Iterator[int]:
    """Open a folder that its owner may read and write from now on. Raises OSError, also for a link
    to a folder."""
    with contextlib.suppress(OSError):
        _permit(name, within)
    folder = os.open(name, FOLDER, dir_fd=within)
    try:
        yield folder
    finally:
        os.close(folder)


def _permit(name: str, within: int | None) -> None:
    """Give the owner of a folder all rights. This never follows a link, even if something replaces
    the folder by one meanwhile."""
    if not hasattr(os, "O_PATH"):
        os.chmod(name, 0o700, dir_fd=within, follow_symlinks=False)
        return
    # Without rights, a folder can only be opened as a path. The kernel's link to what was opened
    # leads to that alone.
    descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=within)
    try:
        os.chmod(f"/proc/self/fd/{descriptor}", 0o700)
    finally:
        os.close(descriptor)
