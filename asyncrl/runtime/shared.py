"""Files that processes on several nodes write and read: checksums made while writing, and proof
that one node sees what another wrote."""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from asyncrl.runtime.files import make_directory, open_regular, replace_text, sync_file

__all__ = [
    "NotSharedError",
    "Probe",
    "Written",
    "answer_probe",
    "size_and_checksum",
    "sync_directory",
    "wait_until_seen",
    "write_summed",
]

Written = tuple[int, int]
"""Bytes of a file, and zlib.crc32 of them."""
SEEN_WITHIN_S = 60.0
"""Seconds in which a file must be seen on another node. NFS keeps attributes for up to a minute by
default."""
ANSWERED_WITHIN_S = 20.0
"""Seconds in which a new folder must be seen. Nobody has looked for it before, so that no cache
says that it is missing."""
LOOK_AGAIN_S = 0.1
NOT_SEEN = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""What a look at a file gives that another node has just made or replaced. A network file system
may know only the folder that was there before."""


class NotSharedError(RuntimeError):
    """A file that one node wrote is not there on another. The message names it and the way out."""


class _Summed:
    """A binary file that is only written to, and knows the bytes and the checksum of what it
    got."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.written: Written = (0, 0)

    def write(self, content: Any) -> int:
        size, checksum = self.written
        view = memoryview(content).cast("B")
        self._file.write(view)
        self.written = (size + view.nbytes, zlib.crc32(view, checksum))
        return view.nbytes

    def flush(self) -> None:
        self._file.flush()


def write_summed(path: Path, write: Callable[[Any], object]) -> Written:
    """Let `write` fill a new file, bring it to the disk, and return its size and checksum. Nothing
    is read again.

    Args:
        write: gets an object with `write(bytes)` and `flush()`.
    """
    with open(path, "wb") as file:
        summed = _Summed(file)
        write(summed)
        file.flush()
        os.fsync(file.fileno())
    return summed.written


def size_and_checksum(path: Path) -> Written:
    """Of a file that somebody else wrote, by reading it."""
    size = checksum = 0
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
            size += len(block)
    return size, checksum


def wait_until_seen(
    directory: Path, sizes: Mapping[str, int], way_out: str, within_s: float = SEEN_WITHIN_S
) -> None:
    """Wait until this process sees each file, at its size. Blocks: call it in a thread.

    Args:
        sizes: name relative to `directory` → bytes.
        way_out: what the message ends with.

    Raises:
        NotSharedError: a file is missing here, or has another size, after `within_s` seconds.
    """
    ends = time.monotonic() + within_s
    for name, size in sizes.items():
        while (seen := _size(directory / name)) != size:
            if time.monotonic() > ends:
                there = "nothing is there" if seen is None else f"{seen:,} bytes are there"
                raise NotSharedError(
                    f"{directory / name} was written with {size:,} bytes on another node, and here"
                    f" {there} after {within_s:g} s; {way_out}"
                )
            time.sleep(LOOK_AGAIN_S)


class Probe:
    """A folder in `directory` by which processes on other nodes show that they have the same
    directory. Make it, let each call `answer_probe` with `folder`, then ask `seen`; a context
    manager, which removes the folder."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.folder = directory / f".probe_{uuid.uuid4().hex}"

    def __enter__(self) -> Probe:
        make_directory(self.folder)
        replace_text(self.folder / "asked", self.folder.name)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def seen(self, name: str, within_s: float = ANSWERED_WITHIN_S) -> bool:
        """Whether this process sees the answer that somebody gave under this name."""
        return _appears(self.folder / name, self.folder.name, within_s)


def answer_probe(folder: Path, name: str, within_s: float = ANSWERED_WITHIN_S) -> bool:
    """Whether this process sees the probe's folder; then it leaves an answer there under `name`.
    Blocks."""
    if not _appears(folder / "asked", folder.name, within_s):
        return False
    replace_text(folder / name, folder.name)
    return True


def _appears(path: Path, text: str, within_s: float) -> bool:
    ends = time.monotonic() + within_s
    while _size(path) != len(text):
        if time.monotonic() > ends:
            return False
        time.sleep(LOOK_AGAIN_S)
    return True


def _size(path: Path) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError as error:
        if error.errno not in NOT_SEEN:
            raise
        return None


def sync_directory(directory: Path) -> None:
    """Bring every file below `directory`, and its names, to the disk."""
    for path in directory.rglob("*"):
        sync_file(path)
    sync_file(directory)
