"""Read the rows of a setting that names data: a file, a glob, a folder, a dataset, or a list of
them.

Training, evaluation and the warm start all use `read_sources`. It refuses values that cannot travel
to a reward and back, so workers never meet them.
"""

from __future__ import annotations

import glob
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from asyncrl.config import ConfigError, Source, sources_of
from asyncrl.contracts.columns import (
    MARK,
    SOURCE_COLUMN,
    as_json,
    damaged,
    is_json,
    uncarried,
    unreadable,
)
from asyncrl.data.jsonl import MOST_ROW_BYTES, read_jsonl, stream_jsonl
from asyncrl.data.splits import folder_files, is_data_file
from asyncrl.runtime.files import parquet
from asyncrl.runtime.files.arrow_files import stream_arrow
from asyncrl.runtime.files.parquet import ExtensionTypeError
from asyncrl.runtime.paths import meant

ROWS_PER_LOOK = 1024
"""Rows measured together before each is measured alone."""
BLOCK_BYTES = 16 << 20
"""Most bytes of a block with several rows, in Arrow's memory."""
WHOLE = {pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32()}
"""Integer types whose values all fit in int64."""


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Rows of one source, contiguous in the table."""

    name: str
    rows: int
    files: int
    weight: float | None


@dataclass(frozen=True, slots=True)
class Rows:
    """The result of `read_sources`."""

    table: pa.Table
    """Columns as described in `asyncrl.contracts.columns`."""
    sources: tuple[SourceRows, ...]


def read_sources(
    value: str | Sequence[Source], field: str = "data.train", prompt_column: str = "prompt"
) -> Rows:
    """Read the rows of all sources, one source after the other, into one table.

    A column that a source lacks is null there. A column with different types in different files or
    sources becomes JSON text, so each value keeps its type. A source's own prompt column is renamed
    to `prompt_column`.

    Args:
        value: a path, or sources.
        field: the setting, for messages.
        prompt_column: name of the column with the prompts.

    Raises:
        ConfigError: a file cannot be read, or has values that cannot travel.
    """
    sources = sources_of(value if isinstance(value, str) else tuple(value))
    tables, found = [], []
    for source in sources:
        files = files_of(source, field)
        table = _unified([part for file in files for part in _read_file(file, field)], field)
        if not table.num_rows:
            raise ConfigError(
                f"{field} = {source.path!r} has no rows; give a file with at least one prompt"
            )
        tables.append(_with_prompt_column(table, source, prompt_column, field))
        found.append(SourceRows(source.label, table.num_rows, len(files), source.weight))
    for table, source_rows in zip(tables, found, strict=True):
        if SOURCE_COLUMN in table.column_names:
            raise ConfigError(
                f"{field}: source {source_rows.name!r} has a column {SOURCE_COLUMN!r}, which"
                " asyncrl uses for the name of a row's source; rename it"
            )
    if len(sources) == 1:
        return Rows(tables[0], tuple(found))
    tables = [_named(table, rows.name) for table, rows in zip(tables, found, strict=True)]
    return Rows(_unified(tables, field), tuple(found))


@dataclass(frozen=True, slots=True)
class Block:
    """Some rows of one file."""

    source: int
    """Which source, counted from 0."""
    file: Path
    first_row: int
    """Rows of all sources before this block."""
    columns: tuple[str, ...]
    """All columns of the file (Parquet), or of these rows (JSONL)."""
    table: pa.Table
    """The wanted ones of them, with the types of these rows; any one if there is none."""


def stream_sources(
    value: str | Sequence[Source],
    columns: Container[str],
    field: str = "data.train",
    rows: int = ROWS_PER_LOOK,
) -> Iterator[Block]:
    """The rows of all sources in blocks of at most `rows` rows and BLOCK_BYTES bytes (or one row),
    in the order of `read_sources`. Memory does not grow with the data.

    Unlike there, types are not unified: each block has its own.

    Args:
        columns: the columns that are wanted, where they exist. Others are left out.

    Raises:
        ConfigError: see `read_sources`.
    """
    first = 0
    for number, source in enumerate(sources_of(value if isinstance(value, str) else tuple(value))):
        before = first
        for file in files_of(source, field):
            for names, table in _stream_file(file, field, rows, columns):
                for part in _bounded(table):
                    yield Block(number, file, first, names, part)
                    first += part.num_rows
        if first == before:
            raise ConfigError(
                f"{field} = {source.path!r} has no rows; give a file with at least one row"
            )


def _bounded(table: pa.Table) -> Iterator[pa.Table]:
    """Slices of a table with at most BLOCK_BYTES bytes, or one row."""
    if table.nbytes <= BLOCK_BYTES or table.num_rows == 1:
        yield table
        return
    half = table.num_rows // 2
    yield from _bounded(table.slice(0, half))
    yield from _bounded(table.slice(half))


def files_of(source: Source, field: str) -> list[Path]:
    """The files of a source, in reading order.

    Raises ConfigError if there are none, or if they do not match the split and subset.
    """
    path = Path(source.path)
    try:
        if path.is_dir():
            return folder_files(path, source.split, source.subset)
    except ValueError as error:
        raise ConfigError(f"{field} = {source.path!r} {error}") from None
    except OSError as error:
        raise ConfigError(f"{field} = {source.path!r} cannot be read: {error.strerror}") from None
    if source.split or source.subset:
        chosen = f"split {source.split!r}" if source.split else f"subset {source.subset!r}"
        raise ConfigError(f"{field} = {source.path!r} is not a folder, so it has no {chosen}")
    if path.is_file():
        return [path]
    if glob.has_magic(source.path):
        paths = [Path(one) for one in glob.glob(source.path, recursive=True)]
        if files := sorted(one for one in paths if one.is_file()):
            return files
    raise ConfigError(
        f"{field} = {source.path!r}: no such file; give a Parquet or JSONL file, a glob, a folder,"
        f" or the owner/name of a dataset on the hub{meant(path)}"
    )


def _read_file(path: Path, field: str) -> list[pa.Table]:
    """The rows of a file, as tables that may differ in columns and types."""
    with _explained(path, field):
        if _is_arrow(path):
            tables = [table for _, table in stream_arrow(path, ROWS_PER_LOOK)]
        elif _is_parquet(path):
            tables = [parquet.read_table(path)]
        else:
            return read_jsonl(path)
    return [_checked(table, path, field) for table in tables]


def _stream_file(
    path: Path, field: str, rows: int, columns: Container[str]
) -> Iterator[tuple[tuple[str, ...], pa.Table]]:
    """All columns of the file, and the wanted ones of at most `rows` rows at a time."""
    if _is_parquet(path):
        tables = parquet.stream_table(path, rows, columns)
    elif _is_arrow(path):
        tables = stream_arrow(path, rows, columns)
    else:
        tables = _wanted(stream_jsonl(path, rows), columns)
    typed = _is_parquet(path) or _is_arrow(path)
    while True:
        with _explained(path, field):
            found = next(tables, None)
        if found is None:
            return
        names, table = found
        if table.num_rows:
            yield names, _checked(table, path, field) if typed else table


def _wanted(
    tables: Iterable[pa.Table], columns: Container[str]
) -> Iterator[tuple[tuple[str, ...], pa.Table]]:
    for table in tables:
        names = table.column_names
        yield tuple(names), table.select([name for name in names if name in columns])


def _is_arrow(path: Path) -> bool:
    return path.suffix.lower() == ".arrow"


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() in (".parquet", ".pq")


@contextmanager
def _explained(path: Path, field: str) -> Iterator[None]:
    """Turn the errors of reading a file into ConfigError."""
    try:
        yield
    except ExtensionTypeError as error:
        raise ConfigError(f"{field}: {error}") from None
    except (pa.ArrowException, OSError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(
            f"{field} = {str(path)!r} cannot be read as Parquet (*.parquet), Arrow (*.arrow) or"
            f" JSONL ({why})"
        ) from None
    except ValueError as error:
        kind = "" if is_data_file(path.name) else "; asyncrl reads Parquet and JSONL, so convert it"
        raise ConfigError(f"{field} = {str(path)!r}: {error}{kind}") from None


def _checked(table: pa.Table, path: Path, field: str) -> pa.Table:
    """A table of a Parquet file, all of whose values can travel."""
    table = _carried(table, path, field)
    _refuse_large_rows(table, path, field)
    return table


def _refuse_large_rows(table: pa.Table, path: Path, field: str) -> None:
    first = 0
    for batch in table.to_batches(max_chunksize=ROWS_PER_LOOK):
        if batch.nbytes > MOST_ROW_BYTES:
            for row in range(batch.num_rows):
                if (size := batch.slice(row, 1).nbytes) > MOST_ROW_BYTES:
                    raise ConfigError(
                        f"{field} = {str(path)!r}: row {first + row} has {size >> 20} MiB, above"
                        f" the limit of {MOST_ROW_BYTES >> 20} MiB for one row; shorten its values,"
                        " or leave the row out"
                    )
        first += batch.num_rows


def _carried(table: pa.Table, path: Path, field: str) -> pa.Table:
    """The table without the file's own metadata. Dictionary columns become plain values."""
    names = table.column_names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{field} = {str(path)!r} has columns {twice} twice; rename one")
    columns = []
    for column, stored in zip(table.columns, table.schema, strict=True):
        if reason := uncarried(stored.type):
            raise ConfigError(f"{field} = {str(path)!r}: column {stored.name!r} {reason}")
        if pa.types.is_dictionary(stored.type):
            column = column.cast(stored.type.value_type)
        if reason := damaged(column) or unreadable(column):
            raise ConfigError(f"{field} = {str(path)!r}: column {stored.name!r} {reason}")
        columns.append(column)
    fields = [pa.field(name, column.type) for name, column in zip(names, columns, strict=True)]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _with_prompt_column(table: pa.Table, source: Source, wanted: str, field: str) -> pa.Table:
    named = source.prompt_column or wanted
    if named not in table.column_names:
        setting = f"{field}: prompt_column" if source.prompt_column else "data.prompt_column"
        raise ConfigError(
            f"{setting} = {named!r} is not a column of {source.path!r}, which has"
            f" {table.column_names}; name one of them"
        )
    if named == wanted:
        return table
    if wanted in table.column_names:
        raise ConfigError(
            f"{field} = {source.path!r} has a column {wanted!r} in addition to its prompt_column"
            f" {named!r}; rename it, or set data.prompt_column to another name"
        )
    return table.rename_columns([wanted if name == named else name for name in table.column_names])


def _named(table: pa.Table, name: str) -> pa.Table:
    names = pa.array([name], pa.string()).take(pa.array(np.zeros(table.num_rows, np.int32)))
    return table.append_column(SOURCE_COLUMN, names)


def _unified(tables: Sequence[pa.Table], field: str) -> pa.Table:
    """The rows of all tables under one schema with all their columns."""
    names = dict.fromkeys(name for table in tables for name in table.column_names)
    fields = [_common(name, tables) for name in names]
    columns = []
    for wanted in fields:
        try:
            parts = [_recast(table, wanted) for table in tables]
        except (TypeError, pa.ArrowException):
            kinds = sorted({str(t.schema.field(wanted.name).type) for t in _having(tables, wanted)})
            raise ConfigError(
                f"{field}: column {wanted.name!r} has types {kinds} in different files, which"
                " cannot be combined; give it one type, or rename one"
            ) from None
        chunks = [chunk for part in parts for chunk in part.chunks]
        columns.append(pa.chunked_array(chunks, wanted.type))
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _having(tables: Sequence[pa.Table], wanted: pa.Field) -> list[pa.Table]:
    return [table for table in tables if wanted.name in table.column_names]


def _common(name: str, tables: Sequence[pa.Table]) -> pa.Field:
    """The type that represents a column's values from all tables without a change."""
    there = [table.schema.field(name) for table in tables if name in table.column_names]
    known = [field for field in there if not pa.types.is_null(field.type)]
    kinds = {field.type for field in known}
    if any(is_json(field) for field in known):
        return pa.field(name, pa.string(), metadata=MARK)
    if not kinds:
        return pa.field(name, pa.null())
    if len(kinds) == 1:
        return pa.field(name, kinds.pop())
    if kinds <= {pa.string(), pa.large_string()}:
        return pa.field(name, pa.large_string())
    if kinds <= WHOLE:
        return pa.field(name, pa.int64())
    if all(pa.types.is_floating(kind) for kind in kinds):
        return pa.field(name, pa.float64())
    return pa.field(name, pa.string(), metadata=MARK)


def _recast(table: pa.Table, wanted: pa.Field) -> pa.ChunkedArray:
    if wanted.name not in table.column_names:
        return pa.chunked_array([pa.nulls(table.num_rows, wanted.type)])
    column, field = table[wanted.name], table.schema.field(wanted.name)
    if pa.types.is_null(field.type):
        return pa.chunked_array([pa.nulls(table.num_rows, wanted.type)])
    if is_json(wanted):
        return as_json(column, field)
    return column if field.type == wanted.type else column.cast(wanted.type)


class RowsByNumber:
    """Access to single rows of a table by number, in any order. The cost depends only on these
    rows.

    `Table.take` copies every chunk of a string column in each call.
    """

    def __init__(self, table: pa.Table) -> None:
        self._schema = table.schema
        self._batches = table.to_batches()
        self._ends = np.cumsum([batch.num_rows for batch in self._batches])

    def row(self, number: int) -> pa.RecordBatch:
        """One row that shares the table's memory."""
        index = int(np.searchsorted(self._ends, number, side="right"))
        batch = self._batches[index]
        return batch.slice(number - int(self._ends[index]) + batch.num_rows, 1)

    def table(self, rows: Sequence[pa.RecordBatch]) -> pa.Table:
        """Rows from `row` as one table with its own memory."""
        if len(rows) == 1:
            return pa.Table.from_batches([rows[0].take([0])], self._schema)
        return pa.Table.from_batches(rows, self._schema).combine_chunks()
