"""The run directory: who may write to it, and which attempt this is."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import yaml

from asyncrl.config import Config, ConfigError
from asyncrl.confined import EscapesDirectory, refuse_links
from asyncrl.control.checkpoint import Checkpoints, NoCheckpoint, State, UnreadableCheckpoint

__all__ = ["RunDirectory", "replace_directory"]


class RunDirectory:
    """`<runs_root>/<name>` under an exclusive lock, for one attempt. A context manager.

    Attributes:
        path: absolute directory.
        state: where control begins: version 0, or the checkpoint's.
        checkpoint: the checkpoint's directory, or None for a new start.

    Raises:
        ConfigError: the directory is in use, exists under `resume: never`, has no readable checkpoint under `must`, or one of another seed.
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
        checkpoints = Checkpoints(self.path / "checkpoints", config.checkpoint.keep)
        self.checkpoint: Path | None = None
        resumed: State | None = None
        if config.resume != "never":
            try:
                self.checkpoint, resumed = checkpoints.latest()
            except NoCheckpoint as error:
                if config.resume == "must":
                    raise ConfigError(str(error)) from None
            except UnreadableCheckpoint as error:
                raise ConfigError(str(error)) from None
        if resumed is not None and resumed.seed != config.seed:
            raise ConfigError(
                f"seed = {config.seed}, but {self.checkpoint} was made with {resumed.seed}, and data order and sampling follow from it; set seed: "
                f"{resumed.seed}, or start a new run under another --name"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = self._acquire()
        self.checkpoints = checkpoints
        self.state = self._begin_attempt(resumed, config.seed)
        for unfinished in (self.path / "checkpoints").glob(".step_*"):
            shutil.rmtree(unfinished)  # of an attempt that was killed while it saved
        _replace_text(self.path / "config.yaml", yaml.safe_dump(config.dump(), sort_keys=False))

    @property
    def logs(self) -> Path:
        """Log directory of this attempt."""
        return self.path / "logs" / f"attempt_{self.state.attempt}"

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._lock)

    def _acquire(self) -> int:
        lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 32).decode() or "another process"
            os.close(lock)
            raise ConfigError(f"run directory {self.path} is in use by process {holder}; wait for it, or choose another --name") from None
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        return lock

    def _refuse_in_use(self) -> None:
        if (self.path / ".lock").exists():
            os.close(self._acquire())

    def _begin_attempt(self, resumed: State | None, seed: int) -> State:
        record = self.path / "run.json"
        tree = json.loads(record.read_text()) if record.exists() else {"run_id": uuid.uuid4().hex, "attempts": 0}
        attempt = tree["attempts"]
        _replace_text(record, json.dumps({**tree, "attempts": attempt + 1}))
        (self.path / "logs" / f"attempt_{attempt}").mkdir(parents=True, exist_ok=True)
        if resumed is None:
            return State(tree["run_id"], attempt, 0, 0, 0, (), seed)
        return replace(resumed, run_id=tree["run_id"], attempt=attempt)


def replace_directory(finished: Path, final: Path) -> None:
    """Give a directory that was written whole its final name; what had the name before is deleted."""
    shutil.rmtree(final, ignore_errors=True)
    os.replace(finished, final)


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    os.replace(temporary, path)
