"""How each admitted group ended: `fates/*.parquet`, one row per group."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa

from asyncrl.runtime import parquet
from asyncrl.runtime.files import make_directory
from asyncrl.runtime.functions import short
from asyncrl.runtime.merging import Merging

__all__ = ["FATES", "OUTCOMES", "Fate", "FatesWriter", "read_fates"]

FATES = pa.schema(
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
OUTCOMES = ("trained", "skipped", "filtered", "dropped", "failed", "waiting")
"""`waiting`: admitted and without another outcome when the attempt ended."""
OUTSTANDING = b"asyncrl.outstanding"
"""Key of a file's metadata: the ordinals that were admitted and had no outcome when it was written, as JSON."""


CHECKSUM = b"asyncrl.checksum"
"""Key of a file's metadata: a hash of its rows and of the outstanding ordinals. Page checksums do not cover a file's footer."""


def read_fates(path: Path) -> tuple[pa.Table, list[int]]:
    """The rows of one file, and the ordinals outstanding when it was written.

    Raises:
        ValueError: the file is damaged, or was changed.
        OSError: it cannot be read.
    """
    table = parquet.read_table(path)
    for field in FATES:
        if (
            field.name not in table.column_names
            or table.schema.field(field.name).type != field.type
        ):
            raise ValueError(
                f"{path} is damaged, or of an older asyncrl: it has no column {field.name!r} of type {field.type}"
            )
    metadata = table.schema.metadata or {}
    outstanding = metadata.get(OUTSTANDING, b"[]")
    if metadata.get(CHECKSUM) != _checksum(table, outstanding):
        raise ValueError(
            f"{path} does not hold what was written: its rows and its checksum disagree"
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
            f"{path} is damaged: its outstanding ordinals are no list of whole numbers"
        )
    return found


def _sealed(table: pa.Table, outstanding: bytes) -> pa.Table:
    return table.replace_schema_metadata(
        {OUTSTANDING: outstanding, CHECKSUM: _checksum(table, outstanding)}
    )


def _checksum(table: pa.Table, outstanding: bytes) -> bytes:
    rows = json.dumps([list(row.values()) for row in table.select(FATES.names).to_pylist()])
    return hashlib.blake2b(rows.encode() + outstanding, digest_size=16).hexdigest().encode()


@dataclass(frozen=True, slots=True)
class Fate:
    """The outcome of one admitted group. Version and staleness only if it was trained; its completion tokens if it was generated: a group aborted
    in mid-generation has none. `attempt` made the group, as in its own row; the file's column `ended_in` has the one that decided: another, if the
    group waited in a checkpoint."""

    attempt: int
    ordinal: int
    outcome: str
    reason: str
    step: int
    trained_at_version: int | None = None
    staleness: int | None = None
    completion_tokens: int | None = None
    content: str | None = None
    """Hash of the group's row; None if it was not scored."""

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome {self.outcome!r} is none of {OUTCOMES}")


class FatesWriter:
    """Appends complete Parquet files, in a thread of its own: each is written under a temporary name, then renamed. They are merged as the run goes on."""

    def __init__(self, directory: Path, attempt: int) -> None:
        self.directory = directory
        self.attempt = attempt
        self.files = 0
        self._merging = Merging(_merge)
        self._thread = ThreadPoolExecutor(1, "fates")
        self._failure: BaseException | None = None
        self._last: Future[None] | None = None
        make_directory(directory)

    def write(self, fates: Sequence[Fate], outstanding: Sequence[int] = ()) -> None:
        """One file of these fates, soon; none for no fates.

        Args:
            outstanding: ordinals admitted in this attempt that have no outcome yet.

        Raises:
            OSError: an earlier file could not be written. Nothing was written after it.
        """
        if self._failure is not None:
            raise self._failure
        if fates:
            self._last = self._thread.submit(self._write, list(fates), list(outstanding))

    def flush(self) -> None:
        """Wait until all of them are on the disk.

        Raises:
            OSError: one could not be written.
        """
        if self._last is not None:
            self._last.result()
        if self._failure is not None:
            raise self._failure

    def compact(self) -> None:
        """Merge this attempt's files into one. The last file's name is kept, so that numbering goes on."""
        self.flush()
        _merge(sorted(self.directory.glob(f"attempt_{self.attempt:04d}-*.parquet")))

    def _write(self, fates: list[Fate], outstanding: list[int]) -> None:
        if self._failure is not None:
            return
        try:
            rows = [
                asdict(fate) | {"reason": short(fate.reason), "ended_in": self.attempt}
                for fate in fates
            ]
            table = _sealed(pa.Table.from_pylist(rows, FATES), json.dumps(outstanding).encode())
            path = self.directory / f"attempt_{self.attempt:04d}-{self.files:06d}.parquet"
            parquet.write_table(table, path)
            self.files += 1
            self._merging.add(path)
        except Exception as error:  # whoever writes or flushes next raises it
            self._failure = error


def _merge(files: Sequence[Path]) -> None:
    """One file in place of several, under the last one's name. Killed in between, it leaves rows twice, and readers drop one of the two."""
    if len(files) < 2:
        return
    tables = [parquet.read_table(file) for file in files]
    rows = pa.concat_tables([table.replace_schema_metadata() for table in tables])
    parquet.write_table(_sealed(rows, tables[-1].schema.metadata[OUTSTANDING]), files[-1])
    for file in files[:-1]:
        file.unlink()
