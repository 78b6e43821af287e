"""Fetches a version into one file in shared memory and checks it there. Until the version is
applied, this file is its only trace on the replica."""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray

from asyncrl.contracts.messages import Manifest
from asyncrl.weights.layout import ALIGNMENT, bucket_checksum
from asyncrl.weights.manifest import Expected, check_manifest

SHARED_MEMORY = Path("/dev/shm")
NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT)
OWN_NAME = re.compile(r"asyncrl-.+-(?P<pid>\d+)\.(weights|queue)")
"""Staging files, and the queues between an engine's workers (`asyncrl.weights.engine`)."""
WORKERS_MEMORY = "vllm_dist_*cpushm_*"
"""Name pattern of the memory in which vLLM's workers on CPU exchange tensors."""
UNMAPPED_S = 60.0
"""Age in seconds from which such memory that nobody maps belongs to an engine that was killed."""


class StagingError(RuntimeError):
    """A version could not be copied to shared memory completely. The weights are unchanged."""


@dataclass(frozen=True, slots=True)
class Staged:
    """A checked version in a file of `nbytes` bytes. `tensors` are (name, shape, dtype, offset in
    the file)."""

    path: Path
    nbytes: int
    tensors: tuple[tuple[str, tuple[int, ...], str, int], ...]
    fetch_s: float

    def update_info(self) -> dict[str, object]:
        """The fields of `asyncrl.weights.apply.StagedUpdate`, for the engine's worker."""
        return {
            "path": str(self.path),
            "nbytes": self.nbytes,
            "tensors": [(n, list(s), d, o) for n, s, d, o in self.tensors],
        }

    def remove(self) -> None:
        """Delete the file. The memory is freed when the last worker unmaps it."""
        self.path.unlink(missing_ok=True)


def fetch_version(
    manifest: Manifest,
    expected: Mapping[str, Expected],
    timeout_s: float,
    directory: Path = SHARED_MEMORY,
) -> Staged:
    """Check the manifest, then copy its buckets one by one from the object store into one file.
    Blocks: call it in a thread.

    Raises:
        ManifestError: the manifest does not fit the model.
        StagingError: shared memory is full, or a bucket is lost, late, or has a wrong size or
            checksum. The file has been removed.
    """
    began = time.monotonic()
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
            # Reserve all of it now: a version that does not fit fails here, not half-way.
            os.posix_fallocate(file.fileno(), 0, nbytes)
            for index, start in enumerate(starts):
                _copy_bucket(
                    manifest, index, file.fileno(), start, timeout_s - (time.monotonic() - began)
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
    return Staged(path, nbytes, tensors, time.monotonic() - began)


def _new_file(name: str, flags: int) -> int:
    """Create the file exclusively. Every user may write to shared memory, so an existing file or
    link of this name must not be opened."""
    return os.open(name, flags | os.O_EXCL | os.O_NOFOLLOW, 0o600)


def sweep(directory: Path = SHARED_MEMORY) -> list[Path]:
    """Delete the staging files, queues and shared memory of engines that have ended, for example
    after a kill. Returns them."""
    removed = []
    for path in [*_of_ended_processes(directory), *_unmapped(directory)]:
        # The file may belong to another user, or another replica may delete it first.
        with suppress(PermissionError, FileNotFoundError):
            path.unlink()
            removed.append(path)
    return removed


def _of_ended_processes(directory: Path) -> list[Path]:
    """Files whose name has the id of a process that has ended."""
    found = []
    for path in sorted(directory.glob("asyncrl-*")):
        match = OWN_NAME.fullmatch(path.name)
        if match is not None and not psutil.pid_exists(int(match["pid"])):
            found.append(path)
    return found


def _unmapped(directory: Path) -> list[Path]:
    """Shared memory of vLLM's workers on CPU that no process maps. Its names have no process id.
    New files are left out, since a worker may be about to map them."""
    old = []
    for path in sorted(directory.glob(WORKERS_MEMORY)):
        with suppress(FileNotFoundError):
            status = path.stat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > UNMAPPED_S:
                old.append(path)
    if not old:
        return []
    mapped = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or is another user's
            mapped.append(maps.read_bytes())
    return [path for path in old if not any(os.fsencode(path) in text for text in mapped)]


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
            f"staging file {str(path)!r} would be outside {directory}; the run's id must not"
            " contain '/'"
        )
    free = shutil.disk_usage(directory).free
    if nbytes > free:
        raise StagingError(
            f"{path.parent} has {free >> 20} MiB free, but this version needs"
            f" {nbytes >> 20} MiB; enlarge shared memory"
        )


def _copy_bucket(manifest: Manifest, index: int, file: int, start: int, timeout_s: float) -> None:
    data = fetch_bucket(manifest, index, timeout_s)
    written = 0
    while written < data.nbytes:
        written += os.pwrite(file, data[written:], start + written)


def fetch_bucket(manifest: Manifest, index: int, timeout_s: float) -> memoryview:
    """The bytes of one bucket in the object store, without a copy if they are on this node.

    Raises:
        StagingError: the bucket is lost, late, or has a wrong size or checksum.
    """
    title = f"bucket {index} of version {manifest.version}"
    try:
        bucket = ray.get(manifest.buckets[index], timeout=max(timeout_s, 0.001))
        data: memoryview = bucket.data.cast("B")
    except ray.exceptions.GetTimeoutError:
        raise StagingError(
            f"{title} did not arrive in time; raise weights.push_timeout_s"
        ) from None
    except ray.exceptions.RayError as error:
        raise StagingError(
            f"{title} is lost ({type(error).__name__}): its learner is gone"
        ) from error
    if data.nbytes != manifest.sizes[index]:
        raise StagingError(
            f"{title} has {data.nbytes} bytes instead of {manifest.sizes[index]}; publish the"
            " version again"
        )
    checksum = bucket_checksum(data)
    if checksum != manifest.checksums[index]:
        raise StagingError(
            f"{title} has checksum {checksum:#018x} instead of"
            f" {manifest.checksums[index]:#018x}; publish the version again"
        )
    return data
