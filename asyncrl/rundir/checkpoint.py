"""Checkpoints. Only a directory that is committed and passes its checksums counts.

checkpoints/step_000120/{learner/…, buffer.parquet, reference/…, config.yaml, state.json, MANIFEST,
COMMITTED}, checkpoints/LATEST
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from asyncrl.contracts.errors import NoCheckpointError, UnreadableCheckpointError
from asyncrl.contracts.messages import Scored
from asyncrl.contracts.protocols import Learner, Scores
from asyncrl.contracts.state import State
from asyncrl.learning.frozen.reference_files import copy_kept
from asyncrl.runtime.files.links import refuse_links
from asyncrl.runtime.files.opening import (
    append_to,
    explain_disk_full,
    make_directory,
    read_text,
    replace_text,
    sync_file,
)
from asyncrl.runtime.files.shared import Written, size_and_checksum, wait_until_seen

STEP = re.compile(r"step_[0-9]+")
"""Names of checkpoints. Other entries of the folder do not belong to asyncrl."""
UNFINISHED = re.compile(r"\.step_[0-9]+\.[0-9]+|\.replaced\.step_[0-9]+")
READ_AT_ONCE = 16
"""Files of a checkpoint that are verified in parallel."""
REFERENCE = "reference"
"""Folder of a refreshed reference policy in a checkpoint and in the run directory."""
ABANDONED = "ABANDONED"
"""Name of the file that marks a committed checkpoint that the run abandoned by
resuming from an older one."""


class CheckpointStore:
    """The checkpoints of one run. Keeps the newest `keep`."""

    def __init__(
        self, directory: Path, keep: int, config: str = "", guard: Callable[[], None] = lambda: None
    ) -> None:
        """
        Args:
            config: text of config.yaml, the resolved config.
            guard: called before each write and deletion. Raises if this process has lost its lock
                on the directory.
        """
        self.directory = directory
        self.keep = keep
        self.config = config
        self.reference: Path | None = None
        """The folder of the reference policy's version
        (`asyncrl.learning.frozen.reference_files`), of which each checkpoint gets a copy.
        None: the reference policy is frozen, or there is none."""
        self._guard = guard

    def remove_unfinished(self) -> None:
        """Delete unfinished checkpoints of killed attempts."""
        for path in self.directory.glob(".*"):
            if UNFINISHED.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)

    async def write(
        self, state: State, waiting: Sequence[Scored], learner: Learner, scores: Scores | None
    ) -> Path:
        """Write a checkpoint under a temporary name, mark it committed, rename it, and point LATEST
        at it. Does not block the event loop.

        Args:
            waiting: the groups of `state.waiting`, in its order.
            learner, scores: save their parts of the checkpoint. `scores` may be None if no group
                waits.
        """
        final = self.directory / f"step_{state.version:06d}"
        temporary = self.directory / f".{final.name}.{os.getpid()}"
        self.remove_unfinished()
        self._guard()
        make_directory(temporary / "learner")
        try:
            with explain_disk_full(final):
                saved = await learner.save(temporary / "learner")
                if waiting and scores is not None:
                    await scores.save(waiting, temporary / "buffer.parquet")
                kept = {}
                if self.reference is not None:
                    kept = await asyncio.to_thread(copy_kept, self.reference, temporary / REFERENCE)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        written = {f"learner/{name}": file for name, file in saved.items()}
        written |= {f"{REFERENCE}/{name}": file for name, file in kept.items()}
        # If this is canceled, the thread still finishes the checkpoint.
        await asyncio.to_thread(self._commit, temporary, final, state, written)
        return final

    def _commit(
        self, temporary: Path, final: Path, state: State, written: Mapping[str, Written]
    ) -> None:
        try:
            with explain_disk_full(final):
                self._seal(temporary, state, written)
                self._guard()
                self._put(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _seal(self, temporary: Path, state: State, written: Mapping[str, Written]) -> None:
        """Write MANIFEST and COMMITTED, after every file is flushed to the disk.

        Args:
            written: the learner's files, with checksums from its ranks, and the reference
                policy's. Each must become visible on this node first.
        """
        wait_until_seen(
            temporary,
            {name: size for name, (size, _) in written.items()},
            "set runs_root and checkpoint.save to storage that every node shares",
        )
        replace_text(temporary / "config.yaml", self.config)
        replace_text(temporary / "state.json", json.dumps(asdict(state)))
        manifest = dict(written)
        for name in sorted(set(_files(temporary)) - set(written)):
            sync_file(temporary / name)
            manifest[name] = size_and_checksum(temporary / name)
        for folder in [path for path in temporary.rglob("*") if path.is_dir()]:
            sync_file(folder)  # the directory entries of the ranks' files
        replace_text(temporary / "MANIFEST", text := json.dumps(manifest, indent=0))
        replace_text(temporary / "COMMITTED", f"{_checksum_of_text(text)}")

    def _put(self, temporary: Path, final: Path) -> None:
        """Rename the checkpoint, point LATEST at it, and delete the oldest ones."""
        if final.exists():  # from before the run went back to an older one
            self._set_aside(final)
        os.replace(temporary, final)
        self.point_at(final.name)
        for old in [path for path in self.newest_first() if path != final][self.keep - 1 :]:
            self._set_aside(old)
        self.remove_unfinished()

    def _set_aside(self, path: Path) -> None:
        """Rename a checkpoint so that it no longer counts. `remove_unfinished` deletes it, now or
        before the next write if another process still reads it."""
        replaced = self.directory / f".replaced.{path.name}"
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(path, replaced)

    def point_at(self, name: str) -> None:
        """Point LATEST at this checkpoint."""
        replace_text(self.directory / "LATEST", f"{name} {_checksum_of_text(name)}")

    def mark_line(self, line: Mapping[int, int]) -> None:
        """Mark the committed checkpoints outside the run's current line, so that they come last.

        Args:
            line: attempt → last version of that attempt in the current line.
        """
        for path in self.newest_first():
            try:
                made_in = int(json.loads(read_text(path / "state.json"))["attempt"])
            except (OSError, ValueError, TypeError, KeyError):
                continue  # damaged: `find` passes it over and reports it
            if _version(path) <= line.get(made_in, -1):
                (path / ABANDONED).unlink(missing_ok=True)
            else:
                append_to(path / ABANDONED).close()

    def find(
        self, version: int | None = None, verified: bool = True
    ) -> tuple[Path, State, list[str]]:
        """Find the checkpoint to resume from and verify its files against its manifest, unless
        `verified` is false.

        Uses `version` if given; otherwise the one that LATEST names, or the next older one that can
        be read.

        Returns:
            The directory, its state, and a line about each checkpoint that was passed over.

        Raises:
            NoCheckpointError: no checkpoint exists, or none of `version`.
            UnreadableCheckpointError: none can be read.
        """
        try:
            committed = self.newest_first()
        except PermissionError as error:
            raise UnreadableCheckpointError(
                f"{error.filename} cannot be read ({error.strerror}); give this user permission to"
                " read it"
            ) from None
        if version is not None:
            committed = [path for path in committed if _version(path) == version]
        if not committed:
            names = ", ".join(map(str, self.versions())) or "none"
            missing = (
                "no committed checkpoint"
                if version is None
                else f"no committed checkpoint of step {version} (there are: {names})"
            )
            raise NoCheckpointError(
                f"{missing} in {self.directory}; start with --resume never or auto"
            )
        passed_over = self._bad_pointer()
        for path in committed:
            try:
                return path, self.read(path) if verified else self.read_state(path), passed_over
            except UnreadableCheckpointError as error:
                passed_over.append(str(error))
        raise UnreadableCheckpointError(
            "; ".join(passed_over)
            + "; restore one of them, or start a new run under another --name"
        )

    @staticmethod
    def read(path: Path) -> State:
        """Verify one checkpoint and return its state.

        Raises:
            UnreadableCheckpointError: a file does not match the manifest, or the state cannot be
                read.
        """
        try:
            refuse_links(path, whole=True)
            text = read_text(path / "MANIFEST")
            marked = read_text(path / "COMMITTED")
            if marked != str(_checksum_of_text(text)):
                raise UnreadableCheckpointError(
                    f"checkpoint {path} is damaged: MANIFEST does not match COMMITTED"
                )
            manifest = json.loads(text)
            listed = {name: _inside(path, name) for name in manifest}
            if unlisted := sorted(
                set(_files(path)) - set(manifest) - {"MANIFEST", "COMMITTED", ABANDONED}
            ):
                raise UnreadableCheckpointError(
                    f"checkpoint {path} has files that its MANIFEST does not list, first"
                    f" {unlisted[0]}; remove what asyncrl did not write"
                )
            # Reading and zlib release the interpreter's lock.
            with ThreadPoolExecutor(READ_AT_ONCE) as threads:
                for name, found in zip(
                    listed, threads.map(size_and_checksum, listed.values()), strict=True
                ):
                    if list(found) != manifest[name]:
                        raise UnreadableCheckpointError(
                            f"checkpoint {path} is damaged: {name} does not match its MANIFEST"
                        )
            return TypeAdapter(State).validate_json(read_text(path / "state.json"), strict=True)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UnreadableCheckpointError(
                f"checkpoint {path} cannot be read ({' '.join(str(error).split())})"
            ) from error

    @staticmethod
    def read_state(path: Path) -> State:
        """The state of a checkpoint that is not verified. Raises UnreadableCheckpointError."""
        try:
            return TypeAdapter(State).validate_json(read_text(path / "state.json"), strict=True)
        except (OSError, ValueError, RecursionError) as error:
            raise UnreadableCheckpointError(
                f"checkpoint {path} cannot be read ({' '.join(str(error).split())})"
            ) from error

    def newest_first(self) -> list[Path]:
        """The committed checkpoints: the one that LATEST names, then older ones of the same line,
        then those that the run went back from. Raises PermissionError for one that may not be
        read."""
        committed = sorted(
            (
                path
                for path in (self.directory.iterdir() if self.directory.is_dir() else ())
                if STEP.fullmatch(path.name) and (path / "COMMITTED").exists()
            ),
            reverse=True,
        )
        named = self._named()
        if named not in committed:
            named = None
        return sorted(
            committed,
            key=lambda path: (path / ABANDONED).exists() or (named is not None and path > named),
        )

    def versions(self) -> list[int]:
        """Versions of the committed checkpoints, in the order of `newest_first`."""
        return [_version(path) for path in self.newest_first()]

    def _named(self) -> Path | None:
        """The checkpoint that LATEST names; None if LATEST is missing or damaged."""
        latest = self.directory / "LATEST"
        name, _, checksum = (
            read_text(latest).strip().partition(" ") if latest.is_file() else ("", "", "")
        )
        return self.directory / name if checksum == str(_checksum_of_text(name)) else None

    def _bad_pointer(self) -> list[str]:
        named = self._named()
        if named is not None and (named / "COMMITTED").exists():
            return []
        problem = (
            "is missing or damaged"
            if named is None
            else f"names {named.name!r}, which is not a committed checkpoint"
        )
        return [
            f"{self.directory / 'LATEST'} {problem}; using the newest committed checkpoint, even if"
            " the run had gone back to an older one"
        ]


def _version(path: Path) -> int:
    return int(path.name.removeprefix("step_")) if STEP.fullmatch(path.name) else -1


def _inside(directory: Path, name: str) -> Path:
    """The path of a file in the checkpoint. A manifest must not name files outside of it."""
    path = directory / name
    if not path.resolve().is_relative_to(directory.resolve()):
        raise UnreadableCheckpointError(
            f"checkpoint {directory} is damaged: its MANIFEST names {name!r}, which is outside"
        )
    return path


def _files(directory: Path) -> list[str]:
    return sorted(
        str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()
    )


def _checksum_of_text(text: str) -> int:
    return zlib.crc32(text.encode())
