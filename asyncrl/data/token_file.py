"""A file of token rows, mapped into memory and read by row number."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from asyncrl.runtime.files.arrow_files import map_table


@dataclass(frozen=True)
class TokenFile:
    """A complete file. The operating system reads its pages on demand, so it takes no memory."""

    path: Path
    table: pa.Table

    @cached_property
    def _batches(self) -> list[pa.RecordBatch]:
        return list(self.table.to_batches())

    @cached_property
    def _starts(self) -> np.ndarray:
        """[B + 1] int64: the first row of each record batch, and the number of rows."""
        return np.concatenate([[0], np.cumsum([batch.num_rows for batch in self._batches])])

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.table.num_rows)

    @property
    def schema(self) -> pa.Schema:
        """Columns, and the metadata that the writer gave."""
        return self.table.schema

    @property
    def metadata(self) -> Mapping[bytes, bytes]:
        """The metadata that the writer gave."""
        return self.schema.metadata or {}

    def take(self, rows: Sequence[int]) -> pa.Table:
        """These rows, in this order, as a table in memory.

        Raises:
            IndexError: there is no such row.
        """
        indices = np.searchsorted(self._starts, rows, side="right") - 1
        taken = []
        for row, index in zip(rows, indices.tolist(), strict=True):
            if not 0 <= row < self.rows:
                raise IndexError(f"row {row} of {self.path}, which has {self.rows} rows")
            taken.append(self._batches[index].slice(row - int(self._starts[index]), 1))
        table = pa.Table.from_batches(taken, self.schema)
        return table.replace_schema_metadata(None).combine_chunks()

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of the file, in hexadecimal."""
        with self.path.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()


def open_token_file(path: Path) -> TokenFile | None:
    """Open a file; None if it does not exist or is not a complete Arrow file."""
    try:
        return TokenFile(path, map_table(path))
    except (OSError, ValueError):
        return None
