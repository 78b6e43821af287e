"""A hash of all that a group's row holds, made once when the group is scored. It is the same after Parquet, compaction and slicing.

The group's fate carries it, so a reader can tell a row that was changed, replaced or given to another ordinal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from asyncrl.types import COLUMNS, REFERENCE_COLUMN, SCORED_COLUMNS, TOKEN_REWARDS_COLUMN

__all__ = ["content_hashes"]

BYTES = 16
TYPED = frozenset({*COLUMNS, *SCORED_COLUMNS, "reward_parts", REFERENCE_COLUMN, TOKEN_REWARDS_COLUMN})
"""Columns whose Arrow type never changes. A dataset's column may get another one when files are merged, so its plain values are hashed."""


def content_hashes(table: pa.Table) -> list[str]:
    """One hash for each row of a table of groups: 32 hexadecimal digits."""
    hashes = [hashlib.blake2b(digest_size=BYTES) for _ in range(table.num_rows)]
    rows = np.arange(table.num_rows + 1)
    for name in sorted(table.column_names):
        for one in hashes:
            one.update(b"\0" + name.encode() + b"\0")
        if name in TYPED:
            _add(hashes, _whole(table[name]), rows)
        else:
            _add_values(hashes, table[name].to_pylist())
    return [one.hexdigest() for one in hashes]


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _add(hashes: Sequence[Any], array: pa.Array, bounds: np.ndarray) -> None:
    """Row i holds the items bounds[i] to bounds[i + 1] of the array."""
    kind = array.type
    if array.null_count:
        _add_items(hashes, array.is_valid().to_numpy(zero_copy_only=False), bounds)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _add_parts(hashes, offsets := array.offsets.to_numpy(), bounds)
        _add(hashes, array.values, offsets[bounds])
    elif pa.types.is_struct(kind):
        _add_struct(hashes, array, bounds)
    elif pa.types.is_string(kind):
        _, offsets_buffer, text = array.buffers()
        offsets = np.frombuffer(offsets_buffer, np.int32)[array.offset : array.offset + len(array) + 1] if len(array) else np.zeros(1, np.int32)
        _add_parts(hashes, offsets, bounds)
        _add_items(hashes, np.frombuffer(text or b"", np.uint8), offsets[bounds])
    else:
        _add_items(hashes, (array.fill_null(0) if array.null_count else array).to_numpy(zero_copy_only=False), bounds)


def _add_parts(hashes: Sequence[Any], offsets: np.ndarray, bounds: np.ndarray) -> None:
    _add_items(hashes, np.diff(offsets), bounds)


def _add_struct(hashes: Sequence[Any], array: pa.Array, bounds: np.ndarray) -> None:
    """Fields in the order of their names. One without any value in a row counts as none: merged files give each row every field."""
    for name, values in sorted(zip((field.name for field in array.type), array.flatten(), strict=True), key=lambda pair: pair[0]):
        if not values.null_count:
            _add_field(hashes, name, values, bounds)
            continue
        known = np.concatenate([[0], np.cumsum(values.is_valid().to_numpy(zero_copy_only=False))])[bounds]
        for row in np.flatnonzero(np.diff(known)).tolist():
            _add_field([hashes[row]], name, values.slice(bounds[row], bounds[row + 1] - bounds[row]), np.array([0, bounds[row + 1] - bounds[row]]))


def _add_field(hashes: Sequence[Any], name: str, values: pa.Array, bounds: np.ndarray) -> None:
    for one in hashes:
        one.update(b"\1" + name.encode() + b"\1")
    _add(hashes, values, bounds)


def _add_items(hashes: Sequence[Any], items: np.ndarray, bounds: np.ndarray) -> None:
    content, width = memoryview(np.ascontiguousarray(items)).cast("B") if len(items) else b"", items.itemsize
    places = (bounds * width).tolist()
    for one, start, end in zip(hashes, places, places[1:], strict=False):
        one.update(content[start:end])


def _add_values(hashes: Sequence[Any], values: Sequence[Any]) -> None:
    for one, value in zip(hashes, values, strict=True):
        one.update(json.dumps(_plain(value), sort_keys=True, default=str).encode())


def _plain(value: Any) -> Any:
    """The value without what a merge of files changes: fields that are None, and whole numbers that became floats."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
