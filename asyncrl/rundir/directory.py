"""The run directory: who may write to it, and which attempt this is."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from asyncrl.config import Config, ConfigError
from asyncrl.contracts.errors import EscapesDirectoryError
from asyncrl.contracts.state import State
from asyncrl.rundir.checkpoint import CheckpointStore
from asyncrl.rundir.metrics import read_metrics
from asyncrl.rundir.outcomes import refuse_old_folder
from asyncrl.rundir.resume import (
    Beginning,
    config_text,
    data_hash,
    find_beginning,
    hash_of,
    model_hash,
)
from asyncrl.runtime.files import (
    DiskFullError,
    NotAFileError,
    append_to,
    make_directory,
    read_text,
    replace_text,
)
from asyncrl.runtime.links import refuse_links

__all__ = ["LockLostError", "RunDirectory", "read_record", "replace_directory"]

OURS = (
    "groups",
    "outcomes",
    "kept",
    "evaluations",
    "checkpoints",
    "logs",
    "hf",
    ".hf",
    ".replaced.hf",
)
"""Folders of a run that only asyncrl writes to: no link is allowed in them at any depth."""
LEFTOVERS = (".hf", ".replaced.hf", ".snapshot_*", ".probe_*")
"""Folders in the run directory that an attempt removes unless it is killed."""
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
RECORD = "run.json"
"""The run's id, and of each attempt where it began."""
Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class LockLostError(RuntimeError):
    """Somebody removed or replaced the lock file of a run that goes on."""


class RunDirectory:
    """`<runs_root>/<name>` under an exclusive lock, for one attempt. A context manager.

    Attributes:
        path: absolute directory.
        state: where control begins: version 0, or the checkpoint's.
        checkpoint: the checkpoint's directory, or None for a new start.
        said: lines on what was looked for, what was found, and what has changed since.

    Raises:
        ConfigError: the directory is in use, exists under `resume: never`, or there is no
            checkpoint that this config can go on from.
    """

    def __init__(self, config: Config) -> None:
        self.path = config.run_directory
        try:
            refuse_links(self.path)
            for name in OURS:
                refuse_links(self.path / name, whole=True)
        except EscapesDirectoryError as error:
            raise ConfigError(str(error)) from None
        if self.path.exists() and config.resume == "never" and any(self.path.iterdir()):
            self._refuse_in_use()
            raise ConfigError(
                f"run directory {self.path} exists; go on with it (--resume auto), or choose"
                " another --name"
            )
        # A directory that is there is locked before it is read. Another is made only when there is
        # something to begin.
        self._locks: list[_Lock] = []
        try:
            self._locks += [self._acquire()] if self.path.exists() else []
            self._begin(config)
        except BaseException as error:
            self._release()
            if isinstance(error, OSError) and error.errno in UNWRITABLE:
                why = (
                    error.strerror
                    if isinstance(error, DiskFullError)
                    else (
                        f"{os.strerror(error.errno or 0)}; set runs_root or ASYNCRL_RUNS to another"
                        " place"
                    )
                )
                raise ConfigError(f"run directory {self.path} cannot be written: {why}") from None
            raise

    def _begin(self, config: Config) -> None:
        known = (
            read_record(self.path)
            if (self.path / RECORD).exists()
            else {"run_id": None, "attempts": []}
        )
        refuse_old_folder(self.path)
        beginning = find_beginning(config, known["run_id"], _has_saved(self.path))
        self.checkpoint, self.said = beginning.checkpoint, beginning.said
        if not self._locks:
            make_directory(self.path)
            self._locks.append(self._acquire())
            if (self.path / RECORD).exists():
                raise ConfigError(
                    f"run directory {self.path}: another driver has begun a run there meanwhile; go"
                    " on with it (--resume auto), or choose another --name"
                )
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
        self.checkpoints.remove_unfinished()
        self._remove_leftovers()
        replace_text(self.path / "config.yaml", text)

    @property
    def logs(self) -> Path:
        """Log directory of this attempt."""
        return self.path / "logs" / f"attempt_{self.state.attempt}"

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._release()

    def _release(self) -> None:
        for lock in self._locks:
            lock.release()
        self._locks = []

    def _remove_leftovers(self) -> None:
        """What an attempt that was killed has left: the last export comes back, and what was only
        half made goes."""
        restore_replaced(self.path / "hf")
        found = [path for pattern in LEFTOVERS for path in self.path.glob(pattern)]
        for path in [*found, *self.checkpoints.directory.glob(".probe_*")]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)

    def _check_locks(self) -> None:
        for lock in self._locks:
            lock.check()

    def _acquire(self) -> _Lock:
        return _Lock.acquire(self.path, f"run directory {self.path}", "choose another --name")

    def _refuse_in_use(self) -> None:
        if (self.path / ".lock").exists():
            self._acquire().release()

    def _begin_attempt(
        self, beginning: Beginning, known: dict[str, Any], config: Config, config_hash: str
    ) -> State:
        """The state to begin with; run.json then says of this attempt where it began and what its
        bounds are."""
        run_id, attempt = known["run_id"] or uuid.uuid4().hex, len(known["attempts"])
        state = beginning.state or State(run_id, attempt, 0, 0, 0, (), config.seed)
        state = replace(
            state,
            run_id=run_id,
            attempt=attempt,
            config_hash=config_hash,
            data_hash=data_hash(config),
            model_hash=model_hash(config),
        )
        begun = {
            "attempt": attempt,
            "from_attempt": beginning.from_attempt,
            "checkpoint": str(beginning.checkpoint) if beginning.checkpoint else None,
            "trained_tokens": beginning.trained_tokens,
            "version": state.version,
            "frontier": state.frontier,
            "finished_above": state.finished_above,
            "waiting": state.waiting,
            "max_staleness": config.staleness.max_staleness,
            "n_samples_per_prompt": config.rollout.n_samples_per_prompt,
            "groups_per_step": config.groups_per_step,
            "data_hash": state.data_hash,
            "model_hash": state.model_hash,
        }
        record = {"run_id": run_id, "attempts": [*known["attempts"], begun]}
        replace_text(
            self.path / RECORD, json.dumps({**record, "checksum": _checksum(record)}, indent=1)
        )
        make_directory(self.path / "logs" / f"attempt_{attempt}")
        return state


@dataclass(frozen=True, slots=True)
class _Lock:
    """An exclusive lock on a directory: on the file `.lock` in it, and on the directory itself,
    which holds when somebody removes the file."""

    path: Path
    file: int
    directory: int

    @classmethod
    def acquire(cls, directory: Path, title: str, way_out: str) -> _Lock:
        """Raises ConfigError if another process has it, or the file is no regular file."""
        path = directory / ".lock"
        try:
            append_to(path).close()  # refuses links, pipes and devices
        except (EscapesDirectoryError, NotAFileError) as error:
            raise ConfigError(str(error)) from None
        lock = cls(path, os.open(path, os.O_RDWR | os.O_NOFOLLOW), os.open(directory, os.O_RDONLY))
        try:
            for descriptor in (lock.file, lock.directory):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock.file, 32).decode(errors="replace")
            lock.release()
            raise ConfigError(
                f"{title} is in use by"
                f" {f'process {holder}' if holder.isdigit() else 'another process'}; wait for it,"
                f" or {way_out}"
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
                f"{self.path} was removed or replaced while this run held it, so another run may"
                " write here; this one stops"
            )

    def release(self) -> None:
        for descriptor in (self.file, self.directory):
            os.close(descriptor)


def _has_saved(directory: Path) -> bool:
    """Whether the run has told of a checkpoint.

    Raises:
        ConfigError: its metrics cannot be read.
    """
    try:
        return any(record["event"] == "checkpoint" for record in read_metrics(directory))
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from None


def _line(attempts: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """The way to the last attempt: each attempt that it goes back to, and the version at which it
    was left."""
    line, at = {}, len(attempts) - 1
    while (before := attempts[at]["from_attempt"]) is not None:
        line[before] = attempts[at]["version"]
        at = before
    return line


def read_record(directory: Path) -> dict[str, Any]:
    """run.json: `run_id`, and `attempts`, one mapping each.

    Raises:
        ConfigError: it is missing, damaged, changed by hand, or of an asyncrl that kept no record
            of its attempts.
    """
    try:
        record: Any = json.loads(read_text(directory / RECORD))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{directory / RECORD} cannot be read ({error}); without it nothing says where the"
            " attempts began"
        ) from None
    checksum = record.pop("checksum", None) if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(record.get("attempts"), list):
        raise ConfigError(
            f"{directory / RECORD} is of an older asyncrl, which kept no record of its attempts;"
            " start a new run with checkpoint.load"
        )
    if checksum != _checksum(record):
        raise ConfigError(
            f"{directory / RECORD} is damaged or was changed by hand: it does not fit its checksum;"
            " put back what asyncrl wrote"
        )
    try:
        begun = TypeAdapter(Annotated[list[_Begun], Field(min_length=1)]).validate_python(
            record["attempts"]
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = " ".join(map(str, first["loc"]))
        raise ConfigError(
            f"{directory / RECORD} is damaged: attempts, {where}: {first['msg'].lower()}; put back"
            " what asyncrl wrote"
        ) from None
    for number, one in enumerate(begun):
        if one.attempt != number or (one.from_attempt is not None and one.from_attempt >= number):
            raise ConfigError(
                f"{directory / RECORD} is damaged: attempt {number} is called {one.attempt} and"
                f" goes on from {one.from_attempt}"
            )
    return record


class _Begun(BaseModel):
    """What run.json says of one attempt, as far as somebody counts with it."""

    model_config = ConfigDict(strict=True)

    attempt: Count
    from_attempt: Count | None
    checkpoint: str | None
    trained_tokens: Count
    version: Count
    frontier: Count
    finished_above: list[Count]
    waiting: list[Annotated[list[Count], Field(min_length=2, max_length=2)]]
    max_staleness: Count
    n_samples_per_prompt: Count
    groups_per_step: Count
    data_hash: str
    model_hash: str


def _checksum(record: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(record, sort_keys=True).encode(), digest_size=16).hexdigest()


def replace_directory(finished: Path, final: Path) -> None:
    """Give a directory that was written whole its final name. What had the name before is deleted
    after that; a process that is killed between leaves it as `.replaced.<name>`, which
    `restore_replaced` puts back."""
    replaced = _replaced(final)
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        os.replace(final, replaced)
    os.replace(finished, final)
    shutil.rmtree(replaced, ignore_errors=True)


def restore_replaced(final: Path) -> None:
    """Put back what `replace_directory` was replacing when it was killed."""
    replaced = _replaced(final)
    if replaced.exists() and not final.exists():
        os.replace(replaced, final)


def _replaced(final: Path) -> Path:
    return final.with_name(f".replaced.{final.name}")
