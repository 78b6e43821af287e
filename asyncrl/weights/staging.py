"""Fetch one version into one file in shared memory, and check it there. Until a version is applied,
nothing but this file exists of it."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from asyncrl.contracts.messages import Manifest
from asyncrl.weights.layout import ALIGNMENT
from asyncrl.weights.manifest import Expected, check_manifest

__all__ = ["Staged", "StagingError", "fetch_version", "sweep"]

SHARED_MEMORY = Path("/dev/shm")
NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)
STAGING_NAME = re.compile(r"asyncrl-.+-(?P<pid>\d+)\.weights")


class StagingError(RuntimeError):
    """A version could not be brought into shared memory whole. Nothing has been changed."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A version, checked, in a file of `nbytes` bytes. `tensors` are (name, shape, dtype, offset in
    the file)."""

    path: Path
    nbytes: int
    tensors: tuple[tuple[str, tuple[int, ...], str, int], ...]
    fetch_s: float

    def update_info(self) -> dict[str, Any]:
        """What the engine's worker is told: fields of `asyncrl.weights.apply.StagedUpdate`."""
        return {
            "path": str(self.path),
            "nbytes": self.nbytes,
            "tensors": [(n, list(s), d, o) for n, s, d, o in self.tensors],
        }

    def remove(self) -> None:
        """Delete the file; a worker that still maps it keeps its memory."""
        self.path.unlink(missing_ok=True)


def fetch_version(
    manifest: Manifest,
    expected: Mapping[str, Expected],
    timeout_s: float,
    directory: Path = SHARED_MEMORY,
) -> Staged:
    """Check the manifest, then bring its buckets one by one from the object store into one file.
    Blocks: call it in a thread.

    Raises:
        ManifestError: the manifest does not fit the model.
        StagingError: no room, a bucket that is lost or late, or one whose size or checksum is
            wrong. The file is gone again.
    """
    begun = time.monotonic()
    check_manifest(manifest, expected)
    starts, nbytes = _bucket_starts(manifest.sizes)
    path = (
        directory
        / f"asyncrl-{manifest.run_id}-{manifest.attempt}-{manifest.version}-{os.getpid()}.weights"
    )
    _check_room(path, directory, nbytes)
    try:
        path.unlink(missing_ok=True)
        with open(path, "wb", opener=_new_file) as file:
            os.posix_fallocate(
                file.fileno(), 0, nbytes
            )  # all of it now: what does not fit fails here, not half-way
            for index, start in enumerate(starts):
                _copy_bucket(
                    manifest, index, file.fileno(), start, timeout_s - (time.monotonic() - begun)
                )
    except BaseException as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            fix = (
                f", and this version needs {nbytes >> 20} MiB there; enlarge shared memory"
                if error.errno in NO_ROOM
                else ""
            )
            raise StagingError(f"{path}: {error.strerror or error}{fix}") from error
        raise
    tensors = tuple(
        (e.name, tuple(e.shape), e.dtype, starts[e.bucket] + e.offset) for e in manifest.tensors
    )
    return Staged(path, nbytes, tensors, time.monotonic() - begun)


def _new_file(name: str, flags: int) -> int:
    """Everybody may write to shared memory: what lies there under our name, a link to elsewhere for
    one, is never opened."""
    return os.open(name, flags | os.O_EXCL | os.O_NOFOLLOW, 0o600)


def sweep(directory: Path = SHARED_MEMORY) -> list[Path]:
    """Delete the staging files of processes that are gone, as after a kill; return them."""
    removed = []
    for path in directory.glob("asyncrl-*.weights"):
        match = STAGING_NAME.fullmatch(path.name)
        if match is not None and not psutil.pid_exists(int(match["pid"])):
            with suppress(
                PermissionError, FileNotFoundError
            ):  # another user's, or another replica swept it first
                path.unlink()
                removed.append(path)
    return removed


def _bucket_starts(sizes: tuple[int, ...]) -> tuple[list[int], int]:
    """Offsets of the buckets in the file, aligned as parameters are, and the file's length."""
    starts, end = [], 0
    for size in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts.append(start)
        end = start + size
    return starts, end


def _check_room(path: Path, directory: Path, nbytes: int) -> None:
    if os.path.dirname(os.path.abspath(path)) != os.path.abspath(directory):
        raise StagingError(
            f"staging file {str(path)!r} would leave {directory}; the run's id may not contain '/'"
        )
    free = shutil.disk_usage(directory).free
    if nbytes > free:
        raise StagingError(
            f"{path.parent} has {free >> 20} MiB free, this version needs {nbytes >> 20} MiB;"
            " enlarge shared memory"
        )


def _copy_bucket(manifest: Manifest, index: int, file: int, start: int, timeout_s: float) -> None:
    title = f"bucket {index} of version {manifest.version}"
    try:
        data = memoryview(ray.get(manifest.buckets[index], timeout=max(timeout_s, 0.001))).cast("B")
    except ray.exceptions.GetTimeoutError:
        raise StagingError(f"{title} did not come in time; raise weights.push_timeout_s") from None
    except ray.exceptions.RayError as error:
        raise StagingError(
            f"{title} is lost ({type(error).__name__}): its learner is gone"
        ) from error
    if data.nbytes != manifest.sizes[index]:
        raise StagingError(
            f"{title} has {data.nbytes} bytes instead of {manifest.sizes[index]}; publish the"
            " version again"
        )
    checksum = zlib.crc32(data)
    if checksum != manifest.checksums[index]:
        raise StagingError(
            f"{title} has checksum {checksum:#010x} instead of {manifest.checksums[index]:#010x};"
            " publish the version again"
        )
    written = 0
    while written < data.nbytes:
        written += os.pwrite(file, data[written:], start + written)
