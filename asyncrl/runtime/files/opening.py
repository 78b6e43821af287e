"""Opening the files of a run. Writers follow no symbolic link, and only regular files are
opened."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, BinaryIO

from asyncrl.contracts.errors import EscapesDirectoryError

DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FILE = 0o666
"""Mode of a new file, from which the system takes the bits of the umask."""
FULL = (errno.ENOSPC, errno.EDQUOT)


class NotAFileError(OSError):
    """A path is not a regular file where one is needed, or is a file where a directory is needed.
    The message names it."""


class DiskFullError(OSError):
    """The file system is full. The message names the file and the free bytes."""


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents.

    Raises:
        EscapesDirectoryError: a component of the path is a symbolic link.
    """
    os.close(_directory(path))


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new binary file that replaces `path` when the block ends without an error. Content and name
    are then on the disk (fsync).

    Raises:
        EscapesDirectoryError: a component of the path's directory is a symbolic link.
        NotAFileError: a directory or a device has this name.
        DiskFullError: no room is left. The new file is removed.
    """
    parent = _directory(path.parent)
    temporary = f".{path.name}.{os.getpid()}"
    try:
        _refuse_other_kinds(path, parent)
        with explain_disk_full(path):
            try:
                with suppress(FileNotFoundError):  # left by an earlier process with this id
                    os.unlink(temporary, dir_fd=parent)
                descriptor = os.open(
                    temporary,
                    os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                    NEW_FILE,
                    dir_fd=parent,
                )
                with os.fdopen(descriptor, "wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, path.name, src_dir_fd=parent, dst_dir_fd=parent)
                sync_file(path.parent)
            except BaseException:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=parent)
                raise
    finally:
        os.close(parent)


def replace_text(path: Path, text: str) -> None:
    """Replace a file's content, by `replacing`."""
    with replacing(path) as file:
        file.write(text.encode())


def append_to(path: Path) -> IO[str]:
    """Open a text file for appending. Creates it if it is missing.

    Raises:
        EscapesDirectoryError: the file, or a component of its path, is a symbolic link.
        NotAFileError: the path exists and is not a regular file.
    """
    parent = _directory(path.parent)
    try:
        _refuse_other_kinds(path, parent)
        return os.fdopen(
            _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, parent), "a", encoding="utf-8"
        )
    finally:
        os.close(parent)


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Links are followed.

    Raises:
        FileNotFoundError: the path does not exist.
        NotAFileError: the path is not a regular file. Opening a pipe would wait for a writer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_a_file(path)
    return os.fdopen(descriptor, "rb")


def read_text(path: Path) -> str:
    """The UTF-8 text of a regular file. Invalid bytes become U+FFFD. Raises like `open_regular`."""
    with open_regular(path) as file:
        return file.read().decode(errors="replace")


def sync_file(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explain_disk_full(path: Path) -> Iterator[None]:
    """Turn the system's error for a full disk into DiskFullError."""
    try:
        yield
    except DiskFullError:
        raise
    except OSError as error:
        if error.errno not in FULL:
            raise
        there = next(one for one in (path, *path.parents) if one.exists())
        free = shutil.disk_usage(there).free
        raise DiskFullError(
            error.errno,
            f"{path} cannot be written: {free:,} bytes are free on its file system; free some room,"
            " or use another one",
        ) from None


def _directory(path: Path) -> int:
    """A descriptor of the directory, opened without following a link. Creates missing
    directories."""
    at = os.open("/", DIRECTORY)
    reached = Path("/")
    for part in Path(os.path.abspath(path)).parts[1:]:
        reached /= part
        try:
            below = _below(at, part, reached)
        finally:
            os.close(at)
        at = below
    return at


def _below(at: int, part: str, reached: Path) -> int:
    try:
        try:
            return os.open(part, DIRECTORY, dir_fd=at)
        except FileNotFoundError:
            # Another process may have created it.
            with explain_disk_full(reached), suppress(FileExistsError):
                os.mkdir(part, dir_fd=at)
            return os.open(part, DIRECTORY, dir_fd=at)
    except NotADirectoryError:
        raise (
            _a_link(reached)
            if reached.is_symlink()
            else NotAFileError(errno.ENOTDIR, f"{reached} is a file, not a directory; remove it")
        ) from None


def _open(path: Path, flags: int, parent: int) -> int:
    try:
        return os.open(path.name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, NEW_FILE, dir_fd=parent)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _a_link(path) from None
        raise


def _refuse_other_kinds(path: Path, parent: int) -> None:
    """Raise if the path exists and is not a regular file."""
    with suppress(FileNotFoundError):
        mode = os.stat(path.name, dir_fd=parent, follow_symlinks=False).st_mode
        if stat.S_ISLNK(mode):
            raise _a_link(path)
        if not stat.S_ISREG(mode):
            raise _not_a_file(path)


def _a_link(path: Path) -> EscapesDirectoryError:
    return EscapesDirectoryError(
        f"{path} is a symbolic link, so writing to it would write elsewhere; replace it with a real"
        " file or directory"
    )


def _not_a_file(path: Path) -> NotAFileError:
    kinds = (
        (path.is_dir, "a directory"),
        (path.is_fifo, "a named pipe"),
        (path.is_socket, "a socket"),
    )
    kind = next((name for check, name in kinds if check()), "a device")
    return NotAFileError(errno.EINVAL, f"{path} is {kind}, not a file; remove it")
