"""A run that is read again and again while it grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.rundir.metrics import METRICS_FILE, records_from
from asyncrl.rundir.reader import Kept, Run
from asyncrl.rundir.record import is_locked

WATCHED = (METRICS_FILE, "groups", "outcomes", "run.json", "config.yaml")


class GrowingRun(Run):
    """Reads each record and each file of rows once. Files that were merged are read again."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._tables: Kept = {}
        self._kept = self._tables
        self._records: list[dict[str, Any]] = []
        self._behind = 0
        """The byte behind the records that are known."""

    def records(self, event: str | None = None) -> list[dict[str, Any]]:
        path = self.directory / METRICS_FILE
        if path.exists() and path.stat().st_size < self._behind:
            self._records, self._behind = [], 0  # somebody wrote another file
        for record, behind in records_from(self.directory, self._behind):
            self._records.append(record)
            self._behind = behind
        return [record for record in self._records if event in (None, record["event"])]

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
