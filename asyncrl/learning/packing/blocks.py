"""Packs a stream of Arrow tables with token lists into packed rows, in bounded memory. Pure. The
supervised rows of a step come as one table.

One window of rows is packed at a time. A window is a fixed number of rows of the stream, so the
sizes of the tables do not change the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from asyncrl.learning.packing.strategies import Pieces, Strategy, pack_rows

SEQ_LENGTHS = "seq_lengths"
"""Column of a packed row: the number of tokens of each segment, list<int32>, in order. TRL uses the
same name."""

WINDOW = 16_384
"""Rows that are packed together. Best fit finds a partner for nearly every row among so many."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of several per-token columns, with their tokens concatenated."""

    lengths: np.ndarray
    """[B] int64."""
    values: dict[str, pa.Array]
    """Column → [sum of lengths]."""

    def followed_by(self, other: _Rows) -> _Rows:
        values = {
            name: pa.concat_arrays([self.values[name], values])
            for name, values in other.values.items()
        }
        return _Rows(np.concatenate([self.lengths, other.lengths]), values)


def pack_blocks(
    blocks: Iterable[pa.Table],
    capacity: int,
    strategy: Strategy = "bfd",
    columns: Sequence[str] = ("input_ids", "loss_mask"),
    window: int = WINDOW,
) -> Iterator[pa.Table]:
    """Pack the rows of a stream into rows of at most `capacity` tokens each. The strategies are
    those of `packing.pack_rows`.

    Rows are packed `window` at a time. `wrapped` continues an unfinished packed row in the next
    window, so only the last packed row of the stream has room left. At most a window and a packed
    row are in memory. Each piece is copied as one contiguous part of the token buffer.

    Args:
        columns: list columns with one item for each token, such as the ids. Other columns are
            dropped, because a packed row consists of several rows.

    Yields:
        One table for each window, with `columns` as list<the column's type>, and `seq_lengths` as
        list<int32>: the tokens of each segment.

    Raises:
        ValueError: a column is missing, its lists differ in length from those of the first column,
            or a row cannot be packed. Errors count rows from the start of the stream.
    """
    if window < 1:
        raise ValueError(f"a window of {window} rows is empty; use at least 1")
    open_row: _Rows | None = None
    for number, table in enumerate(_windows(blocks, window)):
        rows, first_row = _rows_of(table, columns, number * window), number * window
        if strategy != "wrapped":
            yield _packed(rows, pack_rows(rows.lengths, capacity, strategy, first_row))
            continue
        if open_row:
            rows, first_row = open_row.followed_by(rows), first_row - len(open_row.lengths)
        pieces = pack_rows(rows.lengths, capacity, "wrapped", first_row)
        full = int(rows.lengths.sum()) // capacity
        if full:
            yield _packed(rows, _first(pieces, full))
        rest = pieces.lengths[pieces.offsets[full] :]
        open_row = (
            _Rows(
                rest, {name: values.slice(full * capacity) for name, values in rows.values.items()}
            )
            if rest.size
            else None
        )
    if open_row:
        yield _packed(open_row, pack_rows(open_row.lengths, capacity, "wrapped"))


def _windows(blocks: Iterable[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Yield the stream in tables of `rows` rows. The last table may have fewer."""
    window: list[pa.Table] = []
    room = rows
    for block in blocks:
        while block.num_rows:
            window.append(block.slice(0, room))
            block = block.slice(window[-1].num_rows)
            room -= window[-1].num_rows
            if not room:
                yield pa.concat_tables(window)
                window, room = [], rows
    if window:
        yield pa.concat_tables(window)


def _rows_of(table: pa.Table, columns: Sequence[str], first_row: int) -> _Rows:
    """Read the per-token columns. A null counts as an empty list."""
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise ValueError(
            f"per-token columns {missing} are not in the block, which has {table.column_names};"
            " name columns that it has"
        )
    lengths = {
        name: pc.list_value_length(table[name]).fill_null(0).to_numpy().astype(np.int64)
        for name in columns
    }
    tokens = lengths[columns[0]]
    for name, items in lengths.items():
        if (wrong := np.flatnonzero(items != tokens)).size:
            row = wrong[0]
            raise ValueError(
                f"row {first_row + row} has {items[row]} items of {name!r} and {tokens[row]} of"
                f" {columns[0]!r}; give one for each token"
            )
    return _Rows(tokens, {name: _tokens(table[name]) for name in columns})


def _tokens(column: pa.ChunkedArray) -> pa.Array:
    """Concatenate the lists. A column of a single chunk is not copied."""
    # `flatten` respects slices. `values` would return the whole buffer behind them.
    parts = [chunk.flatten() for chunk in column.chunks]
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def _first(pieces: Pieces, bins: int) -> Pieces:
    """Return the first `bins` bins."""
    end = int(pieces.offsets[bins])
    return Pieces(
        pieces.row[:end], pieces.start[:end], pieces.end[:end], pieces.offsets[: bins + 1]
    )


def _packed(rows: _Rows, pieces: Pieces) -> pa.Table:
    """Build a table with one row for each bin."""
    starts = (np.cumsum(rows.lengths) - rows.lengths)[pieces.row] + pieces.start
    ends = np.concatenate([[0], np.cumsum(pieces.lengths)])
    offsets, sizes = pa.array(starts, pa.int32()), pa.array(pieces.lengths, pa.int32())
    # A list view may refer to parts of the tokens in any order. Flattening it copies each part.
    views = {
        name: pa.ListViewArray.from_arrays(offsets, sizes, tokens).flatten()
        for name, tokens in rows.values.items()
    }
    # Flattening does not copy adjacent parts. This copy keeps no input block alive, and its bytes
    # do not depend on how the stream was cut into blocks.
    packed = {
        name: _lists(ends[pieces.offsets], pa.concat_arrays([tokens]))
        for name, tokens in views.items()
    }
    return pa.table({**packed, SEQ_LENGTHS: _lists(pieces.offsets, sizes)})


def _lists(offsets: np.ndarray, values: pa.Array) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
