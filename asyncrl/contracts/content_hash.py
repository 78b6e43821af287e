"""A hash of a group's whole row, computed once when the group is scored.

Writing to Parquet, merging files and slicing do not change it. The group's outcome has a copy, so a
reader notices a row that was changed, replaced or moved to another ordinal. The hash of a row does
not depend on its neighbors in the table: a null in one row cannot change another row's hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from asyncrl.contracts.rows import (
    BASELINE_COLUMNS,
    COLUMNS,
    REFERENCE_COLUMN,
    SCORED_COLUMNS,
    SESSION_COLUMNS,
    TEACHER_TOKENS,
    TOKEN_REWARDS_COLUMN,
    TURN_ADVANTAGE_COLUMN,
    TURN_COLUMNS,
)

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
        *TEACHER_TOKENS,
        "turn_context",
        "baseline_ids",
        "baseline_logprobs",
        "baseline_versions",
    }
)
"""Columns that grow with the tokens. Their Arrow bytes are hashed directly."""
TYPED = frozenset(
    {
        *COLUMNS,
        *SCORED_COLUMNS,
        *BASELINE_COLUMNS,
        *TURN_COLUMNS,
        *SESSION_COLUMNS,
        TURN_ADVANTAGE_COLUMN,
    }
)
"""Columns whose Arrow type never changes. Merging files may change the type of `reward_parts` or a
dataset column, so those are hashed as plain values."""

ENCODE = json.JSONEncoder(sort_keys=True, default=str).encode


def content_hashes(table: pa.Table) -> list[str]:
    """One hash per row of a table of groups, as 32 hexadecimal digits."""
    values: dict[str, list[object]] = {}
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
    """The bytes to hash for each row: list lengths, then items. A row with a null uses JSON."""
    if (parts := _parts(array)) is not None:
        return _cut(parts, len(array))
    singles = [array.take(pa.array([row])) for row in range(len(array))]
    return [
        (
            _cut(parts, 1)[0]
            if (parts := _parts(single)) is not None
            else json.dumps(single.to_pylist()).encode()
        )
        for single in singles
    ]


def _parts(array: pa.Array) -> list[tuple[np.ndarray, np.ndarray | None]] | None:
    """The flat arrays of a nested column, each with its row boundaries (rows + 1 offsets).
    Boundaries of None mean one item per row. Returns None if there is a null."""
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
    """Each row's bytes, concatenated over the parts."""
    bounded = [
        (items, range(rows + 1) if bounds is None else bounds.tolist()) for items, bounds in parts
    ]
    return [
        b"".join([items[bounds[row] : bounds[row + 1]].tobytes() for items, bounds in bounded])
        for row in range(rows)
    ]


def _plain(value: object) -> object:
    """The value, normalized for what merging files may change: None fields are dropped, and whole
    floats become ints."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
