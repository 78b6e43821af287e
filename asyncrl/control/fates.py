"""How each admitted group ended: `fates/*.parquet`, one row per group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa

from asyncrl.runtime import parquet
from asyncrl.runtime.files import make_directory

__all__ = ["FATES", "OUTSTANDING", "Fate", "FatesWriter"]

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
        ("ended_in", pa.int32()),
    ]
)
OUTCOMES = ("trained", "skipped", "filtered", "dropped", "failed", "waiting")
"""`waiting`: admitted and without another outcome when the attempt ended."""
OUTSTANDING = b"asyncrl.outstanding"
"""Key of a file's metadata: the ordinals that were admitted and had no outcome when it was written, as JSON."""


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

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome {self.outcome!r} is none of {OUTCOMES}")


class FatesWriter:
    """Appends complete Parquet files: written under a temporary name, then renamed."""

    def __init__(self, directory: Path, attempt: int) -> None:
        self.directory = directory
        self.attempt = attempt
        self.files = 0
        make_directory(directory)

    def write(self, fates: Sequence[Fate], outstanding: Sequence[int] = ()) -> None:
        """One file of these fates; none for no fates.

        Args:
            outstanding: ordinals admitted in this attempt that have no outcome yet.
        """
        if not fates:
            return
        rows = [asdict(fate) | {"ended_in": self.attempt} for fate in fates]
        table = pa.Table.from_pylist(rows, FATES.with_metadata({OUTSTANDING: json.dumps(list(outstanding))}))
        parquet.write_table(table, self.directory / f"attempt_{self.attempt:04d}-{self.files:06d}.parquet")
        self.files += 1

    def compact(self) -> None:
        """Merge this attempt's files into one. The last file's name is kept, so that numbering goes on."""
        files = sorted(self.directory.glob(f"attempt_{self.attempt:04d}-*.parquet"))
        if len(files) < 2:
            return
        tables = [parquet.read_table(file) for file in files]
        table = pa.concat_tables(tables).replace_schema_metadata(tables[-1].schema.metadata)
        parquet.write_table(table, files[-1])
        for file in files[:-1]:
            file.unlink()
