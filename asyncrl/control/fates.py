"""How each admitted group ended: `fates/*.parquet`, one row per group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

__all__ = ["FATES", "Fate", "FatesWriter"]

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
    ]
)
OUTCOMES = ("trained", "skipped", "filtered", "dropped", "failed", "waiting")
"""`waiting`: admitted and without another outcome when the attempt ended."""


@dataclass(frozen=True, slots=True)
class Fate:
    """The outcome of one admitted group in one attempt. Version and staleness only if it was trained; its completion
    tokens if it was generated: a group aborted in mid-generation has none."""

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
        directory.mkdir(parents=True, exist_ok=True)

    def write(self, fates: Sequence[Fate]) -> None:
        """One file of these fates; none for no fates."""
        if not fates:
            return
        table = pa.Table.from_pylist([asdict(fate) for fate in fates], FATES)
        final = self.directory / f"attempt_{self.attempt}-{self.files:06d}.parquet"
        temporary = final.with_name("." + final.name)
        pq.write_table(table, temporary)
        os.replace(temporary, final)
        self.files += 1

    def compact(self) -> None:
        """Merge this attempt's files into one. The last file's name is kept, so that numbering goes on."""
        files = sorted(self.directory.glob(f"attempt_{self.attempt}-*.parquet"))
        if len(files) < 2:
            return
        table = pa.concat_tables([pq.read_table(file) for file in files])
        temporary = files[-1].with_name("." + files[-1].name)
        pq.write_table(table, temporary)
        os.replace(temporary, files[-1])
        for file in files[:-1]:
            file.unlink()
