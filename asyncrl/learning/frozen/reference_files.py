"""The weights of a refreshed reference policy on the disk, so that a restarted process and a
resumed run find them.

A reference folder has one version: `CURRENT`, and `version_000008/` with config.json and
model.safetensors. Every attempt has such a folder in the run directory. Every checkpoint has one.
`CURRENT` is written last and lists the files with their sizes and checksums. A kill therefore
leaves the old version or the new one. At version 0, the policy has the weights with which the run
began, and `CURRENT` lists no files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from asyncrl.contracts.errors import ReferenceLostError
from asyncrl.contracts.messages import Manifest
from asyncrl.runtime.files.opening import (
    explain_disk_full,
    make_directory,
    read_text,
    replace_text,
    sync_file,
)
from asyncrl.runtime.files.shared import SEEN_WITHIN_S, Written, size_and_checksum, write_summed
from asyncrl.weights.manifest import Expected, check_manifest
from asyncrl.weights.staging import fetch_bucket
from asyncrl.weights.stored import SINGLE, TORCH_NAMES

CURRENT, SETTINGS = "CURRENT", "config.json"
LISTED = re.compile(rf"version_[0-9]{{6,12}}/({re.escape(SINGLE)}|{re.escape(SETTINGS)})", re.ASCII)
"""The files that `CURRENT` may list."""
STORED_NAMES = {name: stored for stored, name in TORCH_NAMES.items()}
"""torch's name of a dtype → its name in a safetensors file."""
LOOK_AGAIN_S = 0.1


class Writes(Protocol):
    """A binary file."""

    def write(self, content: bytes | memoryview, /) -> int: ...


@dataclass(frozen=True, slots=True)
class ReferenceFiles:
    """The version of the reference policy in a reference folder."""

    folder: Path
    version: int
    files: Mapping[str, Written]
    """File, relative to the folder → its size and checksum. Empty at the version with which the run
    began."""

    @property
    def directory(self) -> Path | None:
        """The weights, as a Hugging Face directory. None: the weights are those with which the run
        began."""
        return self.folder / _folder(self.version) if self.files else None

    def verify(self) -> None:
        """Read the files.

        Raises:
            ReferenceLostError: one is missing or does not match its checksum.
        """
        for name, written in self.files.items():
            try:
                found = size_and_checksum(self.folder / name)
            except OSError as error:
                raise _lost(self.folder, f"{name} cannot be read ({error.strerror})") from None
            if found != written:
                raise _lost(self.folder, f"{name} does not match its checksum")


def read_kept(folder: Path) -> ReferenceFiles:
    """The version in a reference folder, as `CURRENT` says. The other files are not read.

    Raises:
        ReferenceLostError: `CURRENT` is missing or damaged.
    """
    try:
        tree = json.loads(read_text(folder / CURRENT))
        version, files = int(tree["version"]), dict(tree["files"])
        if not all(LISTED.fullmatch(name) for name in files):
            raise ValueError("it lists other files than a version's")
        return ReferenceFiles(
            folder, version, {name: (int(size), int(sum_)) for name, (size, sum_) in files.items()}
        )
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise _lost(folder, f"{CURRENT} cannot be read ({' '.join(str(error).split())})") from None


def begin_kept(folder: Path, source: Path | None) -> None:
    """Make a reference folder with the version of the folder `source`. Without one, the version is
    the weights with which the run began.

    Raises:
        ReferenceLostError: `source` has no version.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if source is None:
        make_directory(folder)
        _point_at(ReferenceFiles(folder, 0, {}))
    else:
        copy_kept(source, folder)


def copy_kept(source: Path, target: Path) -> dict[str, Written]:
    """Give a new folder the version of a reference folder. Files are hard links where the file
    system allows it, so a version is on the disk once. They never change: a new version has new
    files.

    Returns:
        Each file of the version, relative to `target` → its size and checksum.

    Raises:
        ReferenceLostError: `source` has no version.
    """
    kept = read_kept(source)
    for name in kept.files:
        make_directory((target / name).parent)
        try:
            os.link(source / name, target / name, follow_symlinks=False)
        except FileNotFoundError:
            raise _lost(source, f"{name} is missing") from None
        except OSError:  # another file system, or one without hard links
            with explain_disk_full(target / name):
                shutil.copyfile(source / name, target / name, follow_symlinks=False)
                sync_file(target / name)
    for folder in {(target / name).parent for name in kept.files}:
        sync_file(folder)
    make_directory(target)
    _point_at(ReferenceFiles(target, kept.version, kept.files))
    return dict(kept.files)


def keep_version(
    folder: Path,
    manifest: Manifest,
    model_path: str | Path,
    expected: Mapping[str, Expected],
    timeout_s: float,
) -> ReferenceFiles:
    """Write a published version to a folder, bucket by bucket, and delete the one before.

    Args:
        model_path: the checkpoint whose config.json describes the weights.
        expected: the tensors of that checkpoint.
        timeout_s: seconds in which all buckets must arrive.

    Raises:
        ManifestError: the version does not fit the model.
        StagingError: a bucket is lost, late, or has a wrong size or checksum.
        DiskFullError: no room is left. The folder still has the version before.
    """
    check_manifest(manifest, expected)
    name = _folder(manifest.version)
    fresh = folder / f".{name}"
    shutil.rmtree(fresh, ignore_errors=True)
    make_directory(fresh)
    settings = (Path(model_path) / SETTINGS).read_bytes()
    deadline = time.monotonic() + timeout_s
    try:
        with explain_disk_full(fresh):
            files = {
                SINGLE: write_summed(fresh / SINGLE, partial(_write_weights, manifest, deadline)),
                SETTINGS: write_summed(fresh / SETTINGS, lambda file: file.write(settings)),
            }
            sync_file(fresh)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    shutil.rmtree(folder / name, ignore_errors=True)  # of a process that was killed here
    os.replace(fresh, folder / name)
    kept = ReferenceFiles(
        folder, manifest.version, {f"{name}/{file}": written for file, written in files.items()}
    )
    _point_at(kept)
    for other in folder.glob("*version_*"):
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)
    return kept


def wait_for(folder: Path, version: int, within_s: float = SEEN_WITHIN_S) -> None:
    """Wait until this process sees a version that a process on another node has written. Blocks.

    Raises:
        ReferenceLostError: it does not see the version in time.
    """
    ends = time.monotonic() + within_s
    while True:
        try:
            kept = read_kept(folder)
            if kept.version == version and all((folder / name).exists() for name in kept.files):
                return
            seen = f"names version {kept.version}"
        except ReferenceLostError:  # storage of a network may show the new file late
            seen = "cannot be read"
        if time.monotonic() > ends:
            raise _lost(
                folder,
                f"another node has written version {version}, and here {CURRENT} {seen}, so"
                " runs_root is not on storage that every node shares",
            )
        time.sleep(LOOK_AGAIN_S)


def _write_weights(manifest: Manifest, deadline: float, file: Writes) -> None:
    """Write the version as a safetensors file: the length of the header, the header, the tensors
    without gaps."""
    entries = sorted(manifest.tensors, key=lambda entry: (entry.bucket, entry.offset))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        header[entry.name] = {
            "dtype": STORED_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [end, end + entry.nbytes],
        }
        end += entry.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the tensors
    file.write(struct.pack("<Q", len(text)) + text)
    for number in range(len(manifest.buckets)):
        bucket = fetch_bucket(manifest, number, deadline - time.monotonic())
        for entry in entries:
            if entry.bucket == number:
                file.write(bucket[entry.offset : entry.offset + entry.nbytes])


def _point_at(kept: ReferenceFiles) -> None:
    tree = {"version": kept.version, "files": kept.files}
    replace_text(kept.folder / CURRENT, json.dumps(tree, indent=1))


def _folder(version: int) -> str:
    return f"version_{version:06d}"


def _lost(folder: Path, why: str) -> ReferenceLostError:
    return ReferenceLostError(
        f"the refreshed reference policy in {folder} is lost: {why}; restore it, resume from"
        " another checkpoint (checkpoint.ckpt_step), or start a new run under another --name"
    )
