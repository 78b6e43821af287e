"""Read JSONL files as Arrow tables without guessing types: each value keeps the type of its JSON
text."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from asyncrl.contracts.columns import encode_column, json_field, json_text

MOST_ROW_BYTES = 64 << 20
"""Largest row in bytes: a line of JSONL, or a row of Parquet in Arrow's memory."""
CHUNK_BYTES = 16 << 20
"""Bytes of lines that become one chunk of a column. Arrow's limit for a chunk is 2 GiB."""
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
SURROGATE = re.compile("[\ud800-\udfff]")
PLAIN = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
"""Python type of all values in a column → its Arrow type. Columns with other types become JSON
text."""


def read_jsonl(path: Path) -> list[pa.Table]:
    """Read the rows of a JSONL file as a list of tables, each with its own columns and types.

    A missing key is null, like a key with the value null. Blank lines are skipped. The file may be
    compressed (.gz, .bz2, .zst, .lz4).

    Raises:
        ValueError: a line is too long, not a JSON object, or not UTF-8. The message has its number.
        OSError: the file cannot be read.
    """
    return list(stream_jsonl(path))


def stream_jsonl(path: Path, most_rows: int | None = None) -> Iterator[pa.Table]:
    """The tables of `read_jsonl`, one at a time, with at most `most_rows` rows each. Raises like
    it."""
    rows: list[dict[str, object]] = []
    numbers, size = list[int](), 0
    for number, line in _lines(path):
        rows.append(_parsed(line, number))
        numbers.append(number)
        size += len(line)
        if size >= CHUNK_BYTES or len(rows) == most_rows:
            yield _table(rows, numbers)
            rows, size, numbers = [], 0, []
    if rows:
        yield _table(rows, numbers)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(Number from 1, bytes) of each line that is not blank."""
    number = 0
    with (
        pa.input_stream(str(path), compression=COMPRESSIONS.get(path.suffix.lower())) as stream,
        io.BufferedReader(stream, 1 << 20) as file,
    ):
        while line := file.readline(MOST_ROW_BYTES + 1):
            number += 1
            if len(line) > MOST_ROW_BYTES:
                raise ValueError(
                    f"line {number} is longer than {MOST_ROW_BYTES >> 20} MiB, the limit for one"
                    " row; shorten its values, or leave the row out"
                )
            # Concatenated files have byte order marks inside, too.
            line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield number, line


def _parsed(line: bytes, number: int) -> dict[str, object]:
    if line.lstrip().startswith(b"["):
        raise ValueError(f"line {number} starts a JSON array; write one object per line")
    try:
        row = DECODER.decode(line.decode())
    except (ValueError, RecursionError) as error:
        why = str(error)
        if isinstance(error, json.JSONDecodeError):
            why = error.msg
        elif isinstance(error, UnicodeDecodeError):
            why = f"it is not UTF-8 ({why})"
        raise ValueError(f"line {number} cannot be read as JSON: {why}") from None
    if row == {}:
        raise ValueError(f"line {number} has an object without keys; leave it out")
    if isinstance(row, dict):
        return row
    raise ValueError(f"line {number} is not a JSON object; write one object per line")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object. Duplicate keys are refused, because choosing a value would be a guess."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!a} appears twice in an object; keep one")
    return found


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _table(rows: list[dict[str, object]], numbers: list[int]) -> pa.Table:
    names = dict.fromkeys(name for row in rows for name in row)
    fields, arrays = [], []
    for name in names:
        values = [row.get(name) for row in rows]
        try:
            field = _field(name, values)
            arrays.append(encode_column(values, field))
        except UnicodeEncodeError:
            raise ValueError(_lone_surrogate(name, values, numbers)) from None
        fields.append(field)
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _field(name: str, values: list[object]) -> pa.Field:
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        return pa.field(name, pa.null())
    kind = PLAIN.get(kinds.pop()) if len(kinds) == 1 else None
    if kind is None or (kind == pa.int64() and not all(map(_fits, values))):
        return json_field(name)
    return pa.field(name, kind)


def _fits(value: object) -> bool:
    """Whether an integer has at most 64 bits. True for any other value."""
    return not isinstance(value, int) or -(1 << 63) <= value < 1 << 63


def _lone_surrogate(name: str, values: list[object], numbers: list[int]) -> str:
    """The message for the first value or key that UTF-8 cannot encode."""
    texts = [name + (json_text(value) or "") for value in values]
    broken = next(index for index, text in enumerate(texts) if SURROGATE.search(text))
    return (
        f"line {numbers[broken]} has half a character (a lone \\ud800 to \\udfff) at {name!a},"
        " which UTF-8 cannot encode; remove it"
    )
