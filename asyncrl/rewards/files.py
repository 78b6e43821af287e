"""groups/*.parquet: one complete file per flush, merged later. Readers drop duplicates, which have
the same (attempt, ordinal)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from asyncrl.runtime.files import parquet
from asyncrl.runtime.files.merging import MERGED_BYTES, Merging


def write_groups(path: Path, tables: Sequence[pa.Table]) -> None:
    """Write one complete Parquet file: write to a temporary name in the same directory, then
    rename."""
    parquet.write_table(_concat(tables), path)


class FlushFiles:
    """The files of one attempt's flushes, merged as the run continues. Use it from one thread."""

    def __init__(self, directory: Path, attempt: int) -> None:
        self._directory, self._attempt = directory, attempt
        self._next = 1 + max(
            (int(path.stem.split("-")[-1]) for path in _files(directory, attempt)), default=-1
        )
        self._merging = Merging(_merge)

    def write(self, tables: Sequence[pa.Table]) -> Path:
        """Write one flush, and return its path. File names sort by attempt and time."""
        path = self._directory / f"attempt_{self._attempt:04d}-{self._next:08d}.parquet"
        write_groups(path, tables)
        self._next += 1
        self._merging.add(path)
        return path


def compact(directory: Path) -> int:
    """Merge the files of each attempt into files of about 64 MiB; return how many files are left.
    Safe while new flushes are written.

    A merged file replaces its last part, under the same name. Then the earlier parts are deleted. A
    crash in between leaves duplicate rows, which readers drop.
    """
    for attempt in sorted({_attempt(path) for path in _files(directory)}):
        batch: list[Path] = []
        size = 0
        for path in _files(directory, attempt):
            batch.append(path)
            size += path.stat().st_size
            if size >= MERGED_BYTES:
                _merge(batch)
                batch, size = [], 0
        _merge(batch)
    return len(_files(directory))


def _merge(files: Sequence[Path]) -> None:
    if len(files) > 1:
        write_groups(
            files[-1], [_without_duplicates(_concat([parquet.read_table(path) for path in files]))]
        )
        for path in files[:-1]:
            path.unlink()


def _without_duplicates(table: pa.Table) -> pa.Table:
    keys = list(zip(table["attempt"].to_pylist(), table["ordinal"].to_pylist(), strict=True))
    first: dict[tuple[int, int], int] = {}
    for row, key in enumerate(keys):
        first.setdefault(key, row)
    return table if len(first) == len(keys) else table.take(list(first.values()))


def _concat(tables: Sequence[pa.Table]) -> pa.Table:
    """One table; a dataset column that is null in one part takes its type from another."""
    return pa.concat_tables(tables, promote_options="permissive")


def _files(directory: Path, attempt: int | None = None) -> list[Path]:
    return sorted(
        directory.glob(
            "attempt_*.parquet" if attempt is None else f"attempt_{attempt:04d}-*.parquet"
        )
    )


def _attempt(path: Path) -> int:
    return int(path.stem.split("-")[0].removeprefix("attempt_"))
