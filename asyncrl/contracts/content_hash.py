"""A hash of all that a group's row holds, made once when the group is scored. It is the same after
Parquet, compaction and slicing.

The group's outcome carries it, so a reader can tell a row that was changed, replaced or given to
another ordinal. What a row hashes to never depends on the rows beside it: a value that is missing
in one of them does not show in another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from asyncrl.contracts.rows import COLUMNS, REFERENCE_COLUMN, SCORED_COLUMNS, TOKEN_REWARDS_COLUMN

__all__ = ["content_hashes"]

BYTES = 16
PER_TOKEN = frozenset(
    {
        "prompt_ids",
        "completion_ids",
        "loss_mask",
        "logprobs",
        "versions",
        REFERENCE_COLUMN,
        TOKEN_REWARDS_COLUMN,
    }
)
"""Columns that grow with the tokens: their bytes are hashed as Arrow holds them."""
TYPED = frozenset({*COLUMNS, *SCORED_COLUMNS})
"""Columns whose Arrow type never changes. A dataset's column and `reward_parts` may get another one
when files are merged, so plain values are hashed."""

ENCODE = json.JSONEncoder(sort_keys=True, default=str).encode


def content_hashes(table: pa.Table) -> list[str]:
    """One hash for each row of a table of groups: 32 hexadecimal digits."""
    values: dict[str, list[Any]] = {}
    contents: list[list[bytes]] = [[] for _ in range(table.num_rows)]
    for name, column in sorted(
        zip(table.column_names, table.columns, strict=True), key=lambda pair: pair[0]
    ):
        if name in PER_TOKEN:
            for content, text in zip(contents, _token_bytes(_whole(column)), strict=True):
                content += (name.encode(), text)
        else:
            values[name] = (
                column.to_pylist()
                if name in TYPED
                else [_plain(value) for value in column.to_pylist()]
            )
    for row, content in enumerate(contents):
        content.append(ENCODE({name: some[row] for name, some in values.items()}).encode())
    return [
        hashlib.blake2b(b"\0".join(content), digest_size=BYTES).hexdigest() for content in contents
    ]


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return (
        column.chunk(0)
        if column.num_chunks == 1
        else pa.concat_arrays(column.chunks)
        if column.num_chunks
        else pa.array([], column.type)
    )


def _token_bytes(array: pa.Array) -> list[bytes]:
    """Of each row the lengths of its lists and its items. A row in which a value is missing is
    hashed as JSON."""
    if (parts := _parts(array)) is not None:
        return _cut(parts, len(array))
    alone = [array.take(pa.array([row])) for row in range(len(array))]
    return [
        (
            _cut(parts, 1)[0]
            if (parts := _parts(one)) is not None
            else json.dumps(one.to_pylist()).encode()
        )
        for one in alone
    ]


def _parts(array: pa.Array) -> list[tuple[np.ndarray, np.ndarray | None]] | None:
    """(items, places of them at which each row begins and the last one ends; None = one item for
    each row). None if a value is missing."""
    parts: list[tuple[np.ndarray, np.ndarray | None]] = []
    bounds = None
    while isinstance(array, pa.ListArray):
        if array.null_count:
            return None
        offsets = array.offsets.to_numpy()
        parts.append((offsets[1:] - offsets[:-1], bounds))
        bounds = offsets if bounds is None else offsets[bounds]
        array = array.values
    leaves = array.flatten() if isinstance(array, pa.StructArray) else [array]
    if array.null_count or any(leaf.null_count for leaf in leaves):
        return None
    return parts + [(leaf.to_numpy(), bounds) for leaf in leaves]


def _cut(parts: Sequence[tuple[np.ndarray, np.ndarray | None]], rows: int) -> list[bytes]:
    """The bytes of each row, part by part."""
    places = [
        (items, range(rows + 1) if bounds is None else bounds.tolist()) for items, bounds in parts
    ]
    return [
        b"".join([items[bounds[row] : bounds[row + 1]].tobytes() for items, bounds in places])
        for row in range(rows)
    ]


def _plain(value: Any) -> Any:
    """The value without what a merge of files changes: fields that are None, and whole numbers that
    became floats."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
