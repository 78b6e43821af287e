"""Files that several nodes share: checksums computed while writing, and checks that one node sees
another node's files."""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING

from asyncrl.runtime.files.opening import make_directory, open_regular, replace_text, sync_file

if TYPE_CHECKING:
    from typing_extensions import Buffer

Written = tuple[int, int]
"""A file's size in bytes, and its zlib.crc32."""
SEEN_WITHIN_S = 60.0
"""Seconds until a file must be visible on another node. NFS caches attributes for up to a minute by
default."""
ANSWERED_WITHIN_S = 20.0
"""Seconds until a new folder must be visible. No cache has an entry for it yet, so this is
short."""
LOOK_AGAIN_S = 0.1
NOT_SEEN = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""Errors for a file that another node has just created or replaced. A network file system may still
see the old folder."""


class NotSharedError(RuntimeError):
    """A file of one node is not visible on another. The message names the file and the fix."""


class _Summed:
    """A write-only binary file that counts its bytes and computes their checksum."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.written: Written = (0, 0)

    def write(self, content: Buffer) -> int:
        size, checksum = self.written
        view = memoryview(content).cast("B")
        self._file.write(view)
        self.written = (size + view.nbytes, zlib.crc32(view, checksum))
        return view.nbytes

    def flush(self) -> None:
        self._file.flush()


def write_summed(path: Path, write: Callable[[_Summed], object]) -> Written:
    """Create a file, flush it to the disk, and return its size and checksum without reading it
    again.

    Args:
        write: writes the content; its argument has `write(bytes)` and `flush()`.
    """
    with open(path, "wb") as file:
        summed = _Summed(file)
        write(summed)
        file.flush()
        os.fsync(file.fileno())
    return summed.written


def size_and_checksum(path: Path) -> Written:
    """The size and checksum of an existing file, by reading it."""
    size = checksum = 0
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
            size += len(block)
    return size, checksum


def wait_until_seen(
    directory: Path, sizes: Mapping[str, int], way_out: str, within_s: float = SEEN_WITHIN_S
) -> None:
    """Wait until this process sees each file at its size. Blocks: call it in a thread.

    Args:
        sizes: name relative to `directory` → bytes.
        way_out: the fix, which ends the message.

    Raises:
        NotSharedError: after `within_s` seconds, a file is missing or has another size.
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
    """A temporary folder in `directory`, to check that processes on other nodes share the
    directory.

    A context manager that removes the folder. Each other process calls `answer_probe(folder,
    name)`, then `seen(name)` tells whether its answer is visible here.
    """

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
        """Whether the answer with this name is visible to this process."""
        return _appears(self.folder / name, self.folder.name, within_s)


def answer_probe(folder: Path, name: str, within_s: float = ANSWERED_WITHIN_S) -> bool:
    """Whether this process sees the probe's folder. If so, leaves an answer called `name` there.
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
    """Flush every file below `directory`, and the directory entries, to the disk."""
    for path in directory.rglob("*"):
        sync_file(path)
    sync_file(directory)
