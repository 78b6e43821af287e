"""`outcomes/*.parquet`: how each admitted group ended, one row per group."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa

from asyncrl.contracts.errors import ConfigError
from asyncrl.contracts.outcomes import Outcome
from asyncrl.runtime.files import parquet
from asyncrl.runtime.files.merging import Merging
from asyncrl.runtime.files.opening import make_directory
from asyncrl.runtime.functions import short

OUTCOME_COLUMNS = pa.schema(
    [
        ("attempt", pa.int32()),
        ("ordinal", pa.int64()),
        ("outcome", pa.string()),
        ("reason", pa.string()),
        ("step", pa.int32()),
        ("trained_at_version", pa.int32()),
        ("staleness", pa.int32()),
        ("completion_tokens", pa.int64()),
        ("content", pa.string()),
        ("ended_in", pa.int32()),
    ]
)
OUTSTANDING = b"asyncrl.outstanding"
"""Key of file metadata: JSON list of the admitted ordinals without an outcome at the time of
writing."""
CHECKSUM = b"asyncrl.checksum"
"""Key of file metadata: hash of the rows and the outstanding ordinals. Page checksums do not cover
the footer."""


def refuse_old_folder(directory: Path) -> None:
    """Raise ConfigError if a run directory has the folder of outcomes under its old name."""
    old = directory / "fates"
    if old.is_dir():
        raise ConfigError(
            f"{old} has the old name of the outcomes folder; rename it to {directory / 'outcomes'}"
        )


def read_outcomes(path: Path) -> tuple[pa.Table, list[int]]:
    """The rows of one file, and the ordinals that were outstanding when it was written.

    Raises:
        ValueError: the file is damaged or was changed.
        OSError: the file cannot be read.
    """
    table = parquet.read_table(path)
    for field in OUTCOME_COLUMNS:
        if (
            field.name not in table.column_names
            or table.schema.field(field.name).type != field.type
        ):
            raise ValueError(
                f"{path} is damaged, or from an older asyncrl: it has no column {field.name!r} of"
                f" type {field.type}"
            )
    metadata = table.schema.metadata or {}
    outstanding = metadata.get(OUTSTANDING, b"[]")
    if metadata.get(CHECKSUM) != _checksum(table, outstanding):
        raise ValueError(
            f"{path} was changed after it was written: its rows do not match its checksum"
        )
    return table, _ordinals(outstanding, path)


def _ordinals(text: bytes, path: Path) -> list[int]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(
        type(ordinal) is int and ordinal >= 0 for ordinal in found
    ):
        raise ValueError(
            f"{path} is damaged: its outstanding ordinals are not a list of whole numbers"
        )
    return found


def _sealed(table: pa.Table, outstanding: bytes) -> pa.Table:
    return table.replace_schema_metadata(
        {OUTSTANDING: outstanding, CHECKSUM: _checksum(table, outstanding)}
    )


def _checksum(table: pa.Table, outstanding: bytes) -> bytes:
    rows = json.dumps(
        [list(row.values()) for row in table.select(OUTCOME_COLUMNS.names).to_pylist()]
    )
    return hashlib.blake2b(rows.encode() + outstanding, digest_size=16).hexdigest().encode()


class OutcomesWriter:
    """Writes outcomes to Parquet files in its own thread, and merges small files. Each file is
    written under a temporary name, then renamed."""

    def __init__(self, directory: Path, attempt: int) -> None:
        self.directory = directory
        self.attempt = attempt
        self.files = 0
        self._merging = Merging(_merge)
        self._thread = ThreadPoolExecutor(1, "outcomes")
        self._failure: BaseException | None = None
        self._last: Future[None] | None = None
        make_directory(directory)

    def write(self, outcomes: Sequence[Outcome], outstanding: Sequence[int] = ()) -> None:
        """Queue one file with these outcomes. Does nothing without outcomes.

        Args:
            outstanding: ordinals admitted in this attempt that have no outcome yet.

        Raises:
            OSError: an earlier file could not be written, nor any after it.
        """
        if self._failure is not None:
            raise self._failure
        if outcomes:
            self._last = self._thread.submit(self._write, list(outcomes), list(outstanding))

    def flush(self) -> None:
        """Wait until all queued files are on the disk.

        Raises:
            OSError: a file could not be written.
        """
        if self._last is not None:
            self._last.result()
        if self._failure is not None:
            raise self._failure

    def compact(self) -> None:
        """Merge this attempt's files into one. It keeps the last file's name, so numbering
        continues."""
        self.flush()
        _merge(sorted(self.directory.glob(f"attempt_{self.attempt:04d}-*.parquet")))

    def _write(self, outcomes: list[Outcome], outstanding: list[int]) -> None:
        if self._failure is not None:
            return
        try:
            rows = [
                asdict(ended) | {"reason": short(ended.reason), "ended_in": self.attempt}
                for ended in outcomes
            ]
            table = _sealed(
                pa.Table.from_pylist(rows, OUTCOME_COLUMNS), json.dumps(outstanding).encode()
            )
            path = self.directory / f"attempt_{self.attempt:04d}-{self.files:06d}.parquet"
            parquet.write_table(table, path)
            self.files += 1
            self._merging.add(path)
        except Exception as error:  # the next write or flush raises it
            self._failure = error


def _merge(files: Sequence[Path]) -> None:
    """Merge files into one with the name of the last. If the process is killed in between, rows are
    duplicated, and readers drop the duplicates."""
    if len(files) < 2:
        return
    tables = [parquet.read_table(file) for file in files]
    rows = pa.concat_tables([table.replace_schema_metadata() for table in tables])
    parquet.write_table(_sealed(rows, tables[-1].schema.metadata[OUTSTANDING]), files[-1])
    for file in files[:-1]:
        file.unlink()
