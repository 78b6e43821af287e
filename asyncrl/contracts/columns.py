"""Dataset columns in Arrow. Values keep the type and shape that their file gave them.

A column with one plain type has that Arrow type. Any other column (chats, nested values, mixed
types) is a string column of JSON text, marked as such in its field's metadata. So a date stays a
string, 18 stays 18, and a message keeps exactly its own keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import pyarrow as pa

SOURCE_COLUMN = "source_name"
"""Column with the name of a row's source, present when there are several sources."""

MARK = {b"asyncrl": b"json"}
"""Field metadata that marks a column of JSON text."""
ROWS_AT_ONCE = 4096
"""Rows that a check converts to Python values at a time."""
MAPS_AS_DICTS = {"maps_as_pydicts": "strict"}


def is_json(field: pa.Field) -> bool:
    """Whether the column's strings are JSON text."""
    return bool(field.metadata) and field.metadata.get(b"asyncrl") == b"json"


def json_field(name: str) -> pa.Field:
    """The Arrow field of a column of JSON text."""
    return pa.field(name, pa.string(), metadata=MARK)


def json_text(value: object) -> str | None:
    """The value as JSON text, with keys in their order. None stays None, which is Arrow's null.

    Raises:
        TypeError: JSON cannot represent the value: bytes, times, decimals.
    """
    if value is None:
        return None
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def column_values(column: pa.Array | pa.ChunkedArray, field: pa.Field) -> list[object]:
    """The column's values as its file gave them. Maps become dicts."""
    if is_json(field):
        texts = column.to_pylist(**MAPS_AS_DICTS)
        return [None if text is None else json.loads(text) for text in texts]
    values: list[object] = column.to_pylist(**MAPS_AS_DICTS)
    return values


def row_values(table: pa.Table) -> list[dict[str, object]]:
    """The table's rows as dicts. Dataset columns have the values that their file gave them."""
    columns = {field.name: column_values(table[field.name], field) for field in table.schema}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def encode_column(values: Sequence[object], field: pa.Field | None) -> pa.Array:
    """The inverse of `column_values`. Arrow infers the type if there is no field."""
    if field is None:
        return pa.array(values)
    if is_json(field):
        return pa.array([json_text(value) for value in values], field.type)
    return pa.array(values, field.type)


def as_json(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    """The column as JSON text. Absent keys of structs stay absent: see `without_absent`.

    Raises:
        TypeError: JSON cannot represent a value.
    """
    if is_json(field) or pa.types.is_null(field.type):
        return column.cast(pa.string())
    nested = pa.types.is_nested(field.type)
    chunks = []
    for chunk in column.chunks:
        values = chunk.to_pylist(**MAPS_AS_DICTS)
        texts = [json_text(without_absent(value) if nested else value) for value in values]
        chunks.append(pa.array(texts, pa.string()))
    return pa.chunked_array(chunks, pa.string())


def is_empty(column: pa.ChunkedArray) -> bool:
    """Whether no row says anything in the column: null, an empty text, or nothing in a list. JSON
    text of a list or an object counts as that."""
    return all(value.as_py() in (None, "", "[]", "{}", [], {}) for value in column)


def without_absent(value: object) -> object:
    """The value without the None entries of its dicts, at any depth.

    A Parquet struct has every key in every row. A message without `tool_calls` reads as
    `tool_calls: None`, which some chat templates would render.
    """
    if isinstance(value, dict):
        return {key: without_absent(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_absent(item) for item in value]
    return value


def uncarried(kind: pa.DataType) -> str | None:
    """Why asyncrl cannot carry values of this Arrow type; None if it can."""
    types = pa.types
    if types.is_map(kind):
        if not (types.is_string(kind.key_type) or types.is_large_string(kind.key_type)):
            return f"has map keys of type {kind.key_type}; use strings"
        return uncarried(kind.item_type)
    if types.is_struct(kind):
        names = [field.name for field in kind]
        if not names or len(set(names)) < len(names):
            return "has a struct without fields, or with two fields of one name"
        return _first(uncarried(field.type) for field in kind)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return uncarried(kind.value_type)
    if types.is_dictionary(kind):
        return uncarried(kind.value_type)
    if types.is_temporal(kind) and getattr(kind, "unit", "") == "ns":
        return f"has type {kind}, finer than Python's times; cast it to microseconds"
    plain = (
        types.is_null(kind)
        or types.is_boolean(kind)
        or types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_decimal(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_date32(kind)
        or types.is_time(kind)
        or types.is_timestamp(kind)
        or types.is_duration(kind)
    )
    return None if plain else f"has type {kind}, which asyncrl does not carry; cast it"


def damaged(column: pa.ChunkedArray) -> str | None:
    """Why the column is not valid Arrow data, such as text that is not UTF-8; None if it is."""
    try:
        column.validate(full=True)
    except pa.ArrowException as error:
        return f"is damaged ({' '.join(str(error).split())}); write the file again"
    return None


def unreadable(column: pa.ChunkedArray) -> str | None:
    """Why a value of the column has no Python equivalent; None if all have one.

    Examples: a map with a repeated key, a time outside the years 1 to 9999, an unknown time zone.
    """
    if not _may_be_unreadable(column.type):
        return None
    for first in range(0, len(column), ROWS_AT_ONCE):
        block = column.slice(first, ROWS_AT_ONCE)
        try:
            block.to_pylist(**MAPS_AS_DICTS)
        except (LookupError, ValueError, ArithmeticError):
            row, why = next(
                found for found in enumerate(map(_why_unreadable, block), first) if found[1]
            )
            return (
                f"in row {row} has a value that Python cannot represent ({why}); correct it, or"
                " leave the row out"
            )
    return None


def _may_be_unreadable(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind) or pa.types.is_temporal(kind):
        return True
    return any(_may_be_unreadable(kind.field(index).type) for index in range(kind.num_fields))


def _why_unreadable(value: pa.Scalar) -> str | None:
    try:
        value.as_py(**MAPS_AS_DICTS)
    except (LookupError, ValueError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason), None)
