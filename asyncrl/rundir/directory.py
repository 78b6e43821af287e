"""The run directory: locking it, and starting an attempt in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import platform
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from asyncrl.config import ConfigError, RunSettings
from asyncrl.contracts.errors import EscapesDirectoryError
from asyncrl.contracts.state import State
from asyncrl.learning.frozen.reference_files import begin_kept
from asyncrl.rundir.checkpoint import REFERENCE, CheckpointStore
from asyncrl.rundir.metrics import read_metrics
from asyncrl.rundir.outcomes import refuse_old_folder
from asyncrl.rundir.record import (
    LOCK,
    RECORD,
    AttemptRecord,
    RunRecord,
    is_locked,
    now,
    read_record,
    versions,
    write_record,
)
from asyncrl.rundir.resume import (
    Beginning,
    config_changes,
    config_text,
    data_hash,
    find_beginning,
    frozen_hashes,
    hash_of,
    model_hash,
)
from asyncrl.runtime.files.links import refuse_links
from asyncrl.runtime.files.opening import (
    DiskFullError,
    NotAFileError,
    append_to,
    make_directory,
    read_text,
    replace_text,
)
from asyncrl.runtime.files.yaml_files import parse_yaml
from asyncrl.runtime.redact import redact

logger = logging.getLogger("asyncrl")

OURS = (
    "groups",
    "outcomes",
    "kept",
    "trained",
    "evaluations",
    REFERENCE,
    "checkpoints",
    "logs",
    "hf",
    ".hf",
    ".replaced.hf",
)
"""Folders that only asyncrl writes to. Links are refused in them at every depth."""
LEFTOVERS = (".hf", ".replaced.hf", ".snapshot_*", ".probe_*", "converted")
"""Folders that an attempt removes from the run directory, unless it is killed."""
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
LOCK_TRIES, LOCK_AGAIN_S = 3, 0.05
"""How often a driver tries to get the lock again, and the seconds between two tries."""


class LockLostError(RuntimeError):
    """The lock file of a running run was removed or replaced."""


class RunDirectory:
    """`<runs_root>/<name>` under an exclusive lock, for one attempt. A context manager.

    Attributes:
        path: absolute path of the directory.
        state: initial state of control: version 0, or that of the checkpoint.
        checkpoint: directory of the checkpoint; None for a new start.
        notes: lines about the search for a checkpoint and what has changed since it was written.
        reference: this attempt's folder of a refreshed reference policy
            (`asyncrl.learning.frozen.reference_files`). None: the reference policy
            is frozen, or there is none.

    Raises:
        ConfigError: the directory is in use, or exists under `resume: never`, or has no checkpoint
            that this config can resume from.
    """

    def __init__(self, config: RunSettings, command: Sequence[str] = ()) -> None:
        """
        Args:
            command: the user's command, for run.json.
        """
        self.path = config.run_directory
        self._command = command
        try:
            refuse_links(self.path)
            for name in OURS:
                refuse_links(self.path / name, whole=True)
        except EscapesDirectoryError as error:
            raise ConfigError(str(error)) from None
        refuse_taken(config)
        # An existing directory is locked before it is read. A new one is created only after the
        # checks have passed.
        self._locks: list[_Lock] = []
        self._made = False
        try:
            new = not self.path.is_dir() or not any(self.path.iterdir())
            self._locks += [self._acquire()] if self.path.exists() else []
            self._begin(config, new)
        except BaseException as error:
            if self._made:  # its name stays free
                shutil.rmtree(self.path, ignore_errors=True)
            self._release()
            if isinstance(error, OSError) and error.errno in UNWRITABLE:
                why = (
                    error.strerror
                    if isinstance(error, DiskFullError)
                    else (
                        f"{os.strerror(error.errno or 0)}; set runs_root or ASYNCRL_RUNS to another"
                        " folder"
                    )
                )
                raise ConfigError(f"run directory {self.path} cannot be written: {why}") from None
            raise

    def _begin(self, config: RunSettings, new: bool) -> None:
        known = read_record(self.path) if (self.path / RECORD).exists() else None
        refuse_old_folder(self.path)
        beginning = find_beginning(config, known and known["run_id"], _has_saved(self.path))
        self.checkpoint, self.notes = beginning.checkpoint, beginning.notes
        if not self._locks:
            make_directory(self.path)
            self._locks.append(self._acquire())
            if (self.path / RECORD).exists():
                raise ConfigError(
                    f"run directory {self.path}: another driver has started a run there just now;"
                    " resume it (--resume auto), or choose another --name"
                )
        self._made = new and not (self.path / RECORD).exists()
        text = config_text(config)
        self.checkpoints = CheckpointStore(
            config.checkpoints_directory, config.checkpoint.keep, text, self._check_locks
        )
        if not self.checkpoints.directory.is_relative_to(self.path):
            make_directory(self.checkpoints.directory)
            self._locks.append(
                _Lock.acquire(
                    self.checkpoints.directory,
                    f"checkpoint.save = {str(self.checkpoints.directory)!r}",
                    "name another directory",
                )
            )
        self.state = self._begin_attempt(beginning, known, config, hash_of(text))
        if (
            beginning.checkpoint is not None
            and beginning.checkpoint.parent == self.checkpoints.directory
        ):
            self.checkpoints.mark_line(_line(read_record(self.path)["attempts"]))
            self.checkpoints.point_at(beginning.checkpoint.name)
        self.reference = self._begin_reference(beginning, config)
        self.checkpoints.remove_unfinished()
        self._remove_leftovers()
        replace_text(self.path / "config.yaml", text)

    @property
    def logs(self) -> Path:
        """Log directory of this attempt."""
        return self.path / "logs" / f"attempt_{self.state.attempt}"

    def end(self, outcome: Literal["finished", "failed", "interrupted"], cause: str = "") -> None:
        """Record in run.json how the attempt ended. It is logged if that cannot be written.

        Args:
            cause: why, in one line; "" = nothing to say.
        """
        try:
            self._check_locks()
            record = read_record(self.path)
            record["attempts"][-1] |= {"end": now(), "outcome": outcome}
            if cause:
                record["attempts"][-1]["cause"] = redact(cause)
            write_record(self.path, record)
        except (OSError, ConfigError, LockLostError) as error:
            logger.warning("%s does not say that the attempt %s: %s", RECORD, outcome, error)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *error: object) -> None:
        self._release()

    def _release(self) -> None:
        for lock in self._locks:
            lock.release()
        self._locks = []

    def _remove_leftovers(self) -> None:
        """Clean up after a killed attempt: restore the last export, and delete unfinished
        folders."""
        restore_replaced(self.path / "hf")
        found = [path for pattern in LEFTOVERS for path in self.path.glob(pattern)]
        for path in [*found, *self.checkpoints.directory.glob(".probe_*")]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)

    def _begin_reference(self, beginning: Beginning, config: RunSettings) -> Path | None:
        """Make this attempt's folder of a refreshed reference policy, and delete those of earlier
        attempts. None: the reference policy is frozen, or there is none."""
        folders = self.path / REFERENCE
        folder = folders / f"attempt_{self.state.attempt}"
        if config.reference_interval is None:
            shutil.rmtree(folders, ignore_errors=True)
            return None
        begin_kept(folder, beginning.reference)
        for other in folders.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        self.checkpoints.reference = folder
        return folder

    def _check_locks(self) -> None:
        for lock in self._locks:
            lock.check()

    def _acquire(self) -> _Lock:
        return _acquire(self.path)

    def _begin_attempt(
        self, beginning: Beginning, known: RunRecord | None, config: RunSettings, config_hash: str
    ) -> State:
        """Record this attempt in run.json and return its initial state."""
        attempts = known["attempts"] if known else []
        run_id, attempt = (known and known["run_id"]) or uuid.uuid4().hex, len(attempts)
        state = beginning.state or State(run_id, attempt, 0, 0, 0, (), config.seed)
        state = replace(
            state,
            run_id=run_id,
            attempt=attempt,
            config_hash=config_hash,
            data_hash=data_hash(config),
            model_hash=model_hash(config),
            frozen_hashes=frozen_hashes(config),
        )
        limits = config.limits
        started = AttemptRecord(
            attempt=attempt,
            from_attempt=beginning.from_attempt,
            checkpoint=str(beginning.checkpoint) if beginning.checkpoint else None,
            trained_tokens=beginning.trained_tokens,
            version=state.version,
            frontier=state.frontier,
            finished_above=list(state.finished_above),
            waiting=[list(group) for group in state.waiting],
            max_staleness=limits.max_staleness,
            masks_stale=limits.masks_stale,
            train_ends=list(limits.train_ends),
            records_tokens=limits.records_tokens,
            n_samples_per_prompt=limits.n_samples_per_prompt,
            groups_per_step=limits.groups_per_step,
            data_hash=state.data_hash,
            model_hash=state.model_hash,
            command=[redact(word) for word in self._command],
            host=platform.node(),
            versions=versions(),
            start=now(),
        )
        write_record(self.path, RunRecord(run_id=run_id, attempts=[*attempts, started]))
        make_directory(self.path / "logs" / f"attempt_{attempt}")
        return state


def refuse_taken(config: RunSettings) -> None:
    """Raise ConfigError if another driver uses the run directory, or if it exists and `resume` is
    `never`."""
    path = config.run_directory
    if is_locked(path):
        _acquire(path).release()
    if config.resume == "never" and path.exists() and any(path.iterdir()):
        raise ConfigError(
            f"run directory {path} exists; resume it (--resume auto), or choose another --name"
        )


def refuse_early(config: RunSettings) -> str | None:
    """Refuse what a RunDirectory will refuse and what is found without reading large files.

    Returns:
        A line that says that the run is finished, if there is nothing left to train; else None.

    Raises:
        ConfigError: see `RunDirectory`.
    """
    refuse_taken(config)
    path = config.run_directory
    if not (path / RECORD).exists():
        find_beginning(config, None, verified=False)
        return None
    record = read_record(path)
    beginning = find_beginning(config, record["run_id"], _has_saved(path), verified=False)
    last = record["attempts"][-1]
    if config.resume == "never" or last.get("outcome") != "finished":
        return None
    # A run that only evaluates has no checkpoint.
    version = 0 if beginning.state is None else beginning.state.version
    steps = _last_step(config, path)
    if steps is None or version < steps or not (path / "hf").is_dir():
        return None
    of = f", and max_steps = {steps}" if version > steps else f" of {steps}"
    return (
        f"run {config.name} is finished: step {version}{of}; the model is in {path / 'hf'}; to"
        " train longer, add --max_steps N"
    )


def _last_step(config: RunSettings, directory: Path) -> int | None:
    """The step after which the run ends. None: only its data would tell."""
    if getattr(config, "max_steps", None) is not None:
        return config.last_step
    before = parse_yaml(read_text(directory / "config.yaml"))
    if not isinstance(before, dict) or not isinstance(before.get("max_steps"), int):
        return None
    steps: int = before.pop("max_steps")
    after = config.dump()
    after.pop("max_steps", None)
    return None if config_changes(before, after) else steps


def _acquire(path: Path) -> _Lock:
    return _Lock.acquire(path, f"run directory {path}", "choose another --name")


@dataclass(frozen=True, slots=True)
class _Lock:
    """An exclusive lock on a directory: on its file `.lock`, and on the directory itself in case a
    user removes the file."""

    path: Path
    file: int
    directory: int

    @classmethod
    def acquire(cls, directory: Path, title: str, way_out: str) -> _Lock:
        """Raises ConfigError if another process has the lock, or `.lock` is not a regular file."""
        path = directory / LOCK
        try:
            append_to(path).close()  # refuses links, pipes and devices
        except (EscapesDirectoryError, NotAFileError) as error:
            raise ConfigError(str(error)) from None
        lock = cls(path, os.open(path, os.O_RDWR | os.O_NOFOLLOW), os.open(directory, os.O_RDONLY))
        try:
            for descriptor in (lock.file, lock.directory):
                _lock(descriptor)
        except BlockingIOError:
            holder = os.read(lock.file, 32).decode(errors="replace")
            lock.release()
            raise ConfigError(
                f"{title} is in use by"
                f" {f'process {holder}' if holder.isdigit() else 'another process'}; wait for it,"
                f" or {way_out}"
            ) from None
        except OSError as error:
            if not os.fstat(lock.file).st_size:
                path.unlink(missing_ok=True)  # the name of the directory stays free
            lock.release()
            raise ConfigError(
                f"{title}: its file system has no locks ({error.strerror}), which keep a second run"
                " out; use another file system"
            ) from None
        os.ftruncate(lock.file, 0)
        os.pwrite(lock.file, str(os.getpid()).encode(), 0)
        return lock

    def check(self) -> None:
        """Raise LockLostError unless the file is still the one that was locked."""
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            there = None
        if there is None or not os.path.samestat(there, os.fstat(self.file)):
            raise LockLostError(
                f"{self.path} was removed or replaced while this run used it, so another run may"
                " write here; this run stops"
            )

    def release(self) -> None:
        for descriptor in (self.file, self.directory):
            os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Lock a file exclusively. Raises BlockingIOError if another process has the lock for longer
    than `is_locked` takes."""
    for _ in range(LOCK_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(LOCK_AGAIN_S)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _has_saved(directory: Path) -> bool:
    """Whether the run's metrics record a checkpoint.

    Raises:
        ConfigError: the metrics cannot be read.
    """
    try:
        return any(record["event"] == "checkpoint" for record in read_metrics(directory))
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from None


def _line(attempts: Sequence[AttemptRecord]) -> dict[int, int]:
    """The attempts that lead to the last one: attempt → version at which the next one started."""
    line, at = {}, len(attempts) - 1
    while (before := attempts[at]["from_attempt"]) is not None:
        line[before] = attempts[at]["version"]
        at = before
    return line


def replace_directory(finished: Path, final: Path) -> None:
    """Give a complete directory its final name, then delete the directory that had the name.

    If the process is killed in between, the old one is left as `.replaced.<name>`, and
    `restore_replaced` restores it.
    """
    replaced = _replaced(final)
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        os.replace(final, replaced)
    os.replace(finished, final)
    shutil.rmtree(replaced, ignore_errors=True)


def restore_replaced(final: Path) -> None:
    """Restore the directory that an interrupted `replace_directory` was replacing."""
    replaced = _replaced(final)
    if replaced.exists() and not final.exists():
        os.replace(replaced, final)


def _replaced(final: Path) -> Path:
    return final.with_name(f".replaced.{final.name}")
