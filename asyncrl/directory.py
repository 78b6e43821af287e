"""The run directory: who may write to it, and which attempt this is."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from asyncrl.config import Config, ConfigError
from asyncrl.confined import EscapesDirectory, refuse_links
from asyncrl.control.checkpoint import Checkpoints, State, replace_synced
from asyncrl.observe.metrics import METRICS_FILE, read_metrics
from asyncrl.resume import Beginning, config_text, data_hash, find_beginning, hash_of, model_hash

__all__ = ["RunDirectory", "read_record", "replace_directory"]

RECORD = "run.json"
"""The run's id, and of each attempt where it began."""


class RunDirectory:
    """`<runs_root>/<name>` under an exclusive lock, for one attempt. A context manager.

    Attributes:
        path: absolute directory.
        state: where control begins: version 0, or the checkpoint's.
        checkpoint: the checkpoint's directory, or None for a new start.
        said: lines on what was looked for, what was found, and what has changed since.

    Raises:
        ConfigError: the directory is in use, exists under `resume: never`, or there is no checkpoint that this config can go on from.
    """

    def __init__(self, config: Config) -> None:
        self.path = config.run_directory
        try:
            refuse_links(self.path)
        except EscapesDirectory as error:
            raise ConfigError(str(error)) from None
        if self.path.exists() and config.resume == "never" and any(self.path.iterdir()):
            self._refuse_in_use()
            raise ConfigError(f"run directory {self.path} exists; go on with it (--resume auto), or choose another --name")
        # A directory that is there is locked before it is read. Another is made only when there is something to begin.
        self._locks = [self._acquire()] if self.path.exists() else []
        try:
            self._begin(config)
        except BaseException:
            self._release()
            raise

    def _begin(self, config: Config) -> None:
        known = read_record(self.path) if (self.path / RECORD).exists() else {"run_id": None, "attempts": []}
        saved = (self.path / METRICS_FILE).exists() and any(record["event"] == "checkpoint" for record in read_metrics(self.path))
        beginning = find_beginning(config, known["run_id"], saved)
        self.checkpoint, self.said = beginning.checkpoint, beginning.said
        if not self._locks:
            self.path.mkdir(parents=True, exist_ok=True)
            self._locks.append(self._acquire())
            if (self.path / RECORD).exists():
                raise ConfigError(
                    f"run directory {self.path}: another driver has begun a run there meanwhile; go on with it (--resume auto), or choose another --name"
                )
        text = config_text(config)
        self.checkpoints = Checkpoints(config.checkpoints_directory, config.checkpoint.keep, text)
        if not self.checkpoints.directory.is_relative_to(self.path):
            self.checkpoints.directory.mkdir(parents=True, exist_ok=True)
            self._locks.append(_lock(self.checkpoints.directory, f"checkpoint.save = {str(self.checkpoints.directory)!r}", "name another directory"))
        self.state = self._begin_attempt(beginning, known, config, hash_of(text))
        if beginning.checkpoint is not None and beginning.checkpoint.parent == self.checkpoints.directory:
            self.checkpoints.mark_line(_line(read_record(self.path)["attempts"]))
            self.checkpoints.point_at(beginning.checkpoint.name)
        for unfinished in [*self.checkpoints.directory.glob(".step_*"), *self.checkpoints.directory.glob(".replaced.*")]:
            shutil.rmtree(unfinished)  # of an attempt that was killed while it saved
        _replace_text(self.path / "config.yaml", text)

    @property
    def logs(self) -> Path:
        """Log directory of this attempt."""
        return self.path / "logs" / f"attempt_{self.state.attempt}"

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._release()

    def _release(self) -> None:
        for lock in self._locks:
            os.close(lock)
        self._locks = []

    def _acquire(self) -> int:
        return _lock(self.path, f"run directory {self.path}", "choose another --name")

    def _refuse_in_use(self) -> None:
        if (self.path / ".lock").exists():
            os.close(self._acquire())

    def _begin_attempt(self, beginning: Beginning, known: dict[str, Any], config: Config, config_hash: str) -> State:
        """The state to begin with; run.json then says of this attempt where it began and what its bounds are."""
        run_id, attempt = known["run_id"] or uuid.uuid4().hex, len(known["attempts"])
        state = beginning.state or State(run_id, attempt, 0, 0, 0, (), config.seed)
        state = replace(state, run_id=run_id, attempt=attempt, config_hash=config_hash, data_hash=data_hash(config), model_hash=model_hash(config))
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
        }
        _replace_text(self.path / RECORD, json.dumps({"run_id": run_id, "attempts": [*known["attempts"], begun]}, indent=1))
        (self.path / "logs" / f"attempt_{attempt}").mkdir(parents=True, exist_ok=True)
        return state


def _lock(directory: Path, title: str, way_out: str) -> int:
    """Raises ConfigError if another process has it."""
    lock = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 32).decode() or "another process"
        os.close(lock)
        raise ConfigError(f"{title} is in use by process {holder}; wait for it, or {way_out}") from None
    os.ftruncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    return lock


def _line(attempts: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """The way to the last attempt: each attempt that it goes back to, and the version at which it was left."""
    line, at = {}, len(attempts) - 1
    while (before := attempts[at]["from_attempt"]) is not None:
        line[before] = attempts[at]["version"]
        at = before
    return line


def read_record(directory: Path) -> dict[str, Any]:
    """run.json: `run_id`, and `attempts`, one mapping each.

    Raises:
        ConfigError: it is missing, damaged, or of an asyncrl that kept no record of its attempts.
    """
    try:
        record: dict[str, Any] = json.loads((directory / RECORD).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory / RECORD} cannot be read ({error}); without it nothing says where the attempts began") from None
    if not isinstance(record.get("attempts"), list):
        raise ConfigError(f"{directory / RECORD} is of an older asyncrl, which kept no record of its attempts; start a new run with checkpoint.load")
    return record


def replace_directory(finished: Path, final: Path) -> None:
    """Give a directory that was written whole its final name; what had the name before is deleted."""
    shutil.rmtree(final, ignore_errors=True)
    os.replace(finished, final)


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    replace_synced(temporary, path)
