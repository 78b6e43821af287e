"""Packing of a stream of Arrow blocks: rows of token lists in, packed rows out, in bounded memory
and whatever the blocks' sizes. Pure. The supervised rows of a step come as one block.

One window of rows is packed at a time. Windows are counted in rows of the stream, so that how it is
cut into blocks changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from asyncrl.packing.packing import Pieces, Strategy, pack_rows

__all__ = ["SEQ_LENGTHS", "WINDOW", "pack_blocks"]

SEQ_LENGTHS = "seq_lengths"
"""Column of a packed row: tokens of each of its segments, list<int32>, in order. The name is TRL's.
"""

WINDOW = 16_384
"""Rows that are packed together: enough for best fit to find a partner for nearly every row."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of several per-token columns, as one run of tokens."""

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
    """Pack the rows of a stream into rows of at most `capacity` tokens each. Strategies as in
    `packing.pack_rows`.

    Rows are packed `window` at a time; `wrapped` carries an unfinished packed row on to the next
    window, so that only the stream's last one has room left. At most a window and a packed row are
    held. Token lists are read as one run of memory, of which pieces are copied whole.

    Args:
        columns: per-token list columns: the ids, and what else has one item for each token. Other
            columns are left out: a packed row has several rows.

    Yields:
        Tables of `columns` as list<the column's own type>, and `seq_lengths`: list<int32>, the
        tokens of each segment. One table for each window.

    Raises:
        ValueError: a column is missing, its lists are of other lengths than the first column's, or
            a row cannot be packed; rows are counted from the start of the stream.
    """
    if window < 1:
        raise ValueError(f"a window of {window} rows holds none; give at least 1")
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
    """The stream in tables of so many rows; the last may have fewer."""
    held: list[pa.Table] = []
    room = rows
    for block in blocks:
        while block.num_rows:
            held.append(block.slice(0, room))
            block = block.slice(held[-1].num_rows)
            room -= held[-1].num_rows
            if not room:
                yield pa.concat_tables(held)
                held, room = [], rows
    if held:
        yield pa.concat_tables(held)


def _rows_of(table: pa.Table, columns: Sequence[str], first_row: int) -> _Rows:
    """The per-token columns. A missing list counts as an empty one."""
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise ValueError(
            f"per-token columns {missing} are not in the block, which has {table.column_names};"
            " name the ones it has"
        )
    lengths = {
        name: pc.list_value_length(table[name]).fill_null(0).to_numpy().astype(np.int64)
        for name in columns
    }
    tokens = lengths[columns[0]]
    for name, others in lengths.items():
        if (wrong := np.flatnonzero(others != tokens)).size:
            row = wrong[0]
            raise ValueError(
                f"row {first_row + row} has {others[row]} items of {name!r} and {tokens[row]} of"
                f" {columns[0]!r}; give one for each token"
            )
    return _Rows(tokens, {name: _tokens(table[name]) for name in columns})


def _tokens(column: pa.ChunkedArray) -> pa.Array:
    """What the lists hold, one after the other; of a single chunk without a copy."""
    # `flatten` respects slices; `values` is all of the memory behind them.
    parts = [chunk.flatten() for chunk in column.chunks]
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def _first(pieces: Pieces, bins: int) -> Pieces:
    """The first so many bins."""
    end = int(pieces.offsets[bins])
    return Pieces(
        pieces.row[:end], pieces.start[:end], pieces.end[:end], pieces.offsets[: bins + 1]
    )


def _packed(rows: _Rows, pieces: Pieces) -> pa.Table:
    """One row for each bin."""
    starts = (np.cumsum(rows.lengths) - rows.lengths)[pieces.row] + pieces.start
    ends = np.concatenate([[0], np.cumsum(pieces.lengths)])
    offsets, sizes = pa.array(starts, pa.int32()), pa.array(pieces.lengths, pa.int32())
    # A list view may name its parts of the tokens in any order; flattening copies each part whole.
    views = {
        name: pa.ListViewArray.from_arrays(offsets, sizes, tokens).flatten()
        for name, tokens in rows.values.items()
    }
    # Parts that follow one another are not copied by that. Memory of its own keeps no block alive,
    # and its bytes do not tell how blocks were cut.
    packed = {
        name: _lists(ends[pieces.offsets], pa.concat_arrays([tokens]))
        for name, tokens in views.items()
    }
    return pa.table({**packed, SEQ_LENGTHS: _lists(pieces.offsets, sizes)})


def _lists(offsets: np.ndarray, values: pa.Array) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values)
