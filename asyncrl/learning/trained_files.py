"""`trained/*.parquet`: what each policy step computed at the tokens that it trained."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa

from asyncrl.contracts.rows import TRAINED_COLUMNS
from asyncrl.runtime.files import parquet
from asyncrl.runtime.files.merging import Merging
from asyncrl.runtime.files.opening import make_directory

FOLDER = "trained"


class TrainedFiles:
    """The files of one rank in one attempt, written in a thread of their own, and merged as the run
    continues."""

    def __init__(self, run_directory: Path, attempt: int, rank: int) -> None:
        self._directory = run_directory / FOLDER
        self._attempt, self._rank = attempt, rank
        self._files = 0
        self._merging = Merging(_merge)
        self._thread = ThreadPoolExecutor(1, "trained")
        self._last: Future[None] | None = None

    def write(self, rows: pa.Table) -> None:
        """Begin to write one file with the rows of a step on this rank: TRAINED_COLUMNS except
        `trained_in`. Waits for the file of the step before, so that a rank that dies loses one file
        at most. Does nothing without rows.

        Raises:
            OSError: an earlier file could not be written.
        """
        self.flush()
        if rows.num_rows:
            self._last = self._thread.submit(self._write, rows)

    def flush(self) -> None:
        """Wait until all files are complete. Raises OSError if one could not be written."""
        if self._last is not None:
            self._last.result()

    def _write(self, rows: pa.Table) -> None:
        trained_in = pa.array([self._attempt] * len(rows), TRAINED_COLUMNS["trained_in"])
        table = rows.append_column("trained_in", trained_in).select([*TRAINED_COLUMNS])
        make_directory(self._directory)
        name = f"attempt_{self._attempt:04d}-rank_{self._rank:04d}-{self._files:08d}.parquet"
        parquet.write_table(table, self._directory / name)
        self._files += 1
        self._merging.add(self._directory / name)


def _merge(files: Sequence[Path]) -> None:
    """Merge files into one with the name of the last. If the process is killed in between, rows are
    duplicated, and readers drop the duplicates."""
    tables = [parquet.read_table(file) for file in files]
    parquet.write_table(pa.concat_tables(tables), files[-1])
    for file in files[:-1]:
        file.unlink()
