"""A run that is read again and again while it grows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from asyncrl.config import RunSettings, load_any
from asyncrl.rundir.metrics import METRICS_FILE, records_from
from asyncrl.rundir.reader import Kept, Run
from asyncrl.rundir.record import is_locked

TAIL = 4096
"""Bytes before the first unknown record that are compared."""
WATCHED = (METRICS_FILE, "groups", "outcomes", "trained", "run.json", "config.yaml")


class GrowingRun(Run):
    """Reads each record and each file of rows once. Files that were merged are read again."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._tables: Kept = {}
        self._kept = self._tables
        self._records: list[dict[str, Any]] = []
        self._behind = 0
        """The byte behind the records that are known."""
        self._file: tuple[int, bytes] = (0, b"")
        """The inode of their file, and its last bytes before `_behind`."""

    @property
    def settings(self) -> RunSettings:  # a resume may change them
        return load_any(self.directory / "config.yaml")

    def records(self, event: str | None = None) -> list[dict[str, Any]]:
        path = self.directory / METRICS_FILE
        if self._tail(path) != self._file:
            self._records, self._behind = [], 0  # somebody wrote another file
        for record, behind in records_from(self.directory, self._behind):
            self._records.append(record)
            self._behind = behind
        self._file = self._tail(path)
        return [record for record in self._records if event in (None, record["event"])]

    def _tail(self, path: Path) -> tuple[int, bytes]:
        """What tells whether the known part of the file is still the same."""
        if not path.is_file():
            return (0, b"")
        with path.open("rb") as file:
            file.seek(max(0, self._behind - TAIL))
            return (os.fstat(file.fileno()).st_ino, file.read(min(TAIL, self._behind)))

    def forget_removed(self) -> None:
        """Free the tables of files that are gone."""
        for path in [path for path in self._tables if not path.exists()]:
            del self._tables[path]

    def stamp(self) -> tuple[object, ...]:
        """A value that changes whenever the run writes something, starts or ends."""
        found: list[object] = [is_locked(self.directory)]
        for name in WATCHED:
            path = self.directory / name
            if path.exists():
                state = path.stat()
                found.append((name, state.st_size, state.st_mtime_ns))
        return tuple(found)
