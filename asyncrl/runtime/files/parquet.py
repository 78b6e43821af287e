"""Reading and writing Parquet safely: no file can run code, and damaged pages raise errors.

pyarrow instantiates registered Arrow extension types while it reads a footer, and some of them
unpickle data from the file. So the footer is searched for extension types before pyarrow reads it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet

from asyncrl.runtime.files.opening import open_regular, replacing

MAGIC = b"PAR1"
TAIL = 8
"""Bytes after the footer: its length (little-endian) and the magic."""
LARGEST_FOOTER = 1 << 30

STORED_SCHEMA = re.compile(rb"[A-Za-z0-9+/]{64,}={0,2}")
"""Candidates for a stored Arrow schema: base64 text."""
EXTENSION = b"ARROW:extension:name"


class ExtensionTypeError(ValueError):
    """A file has a column of an Arrow extension type, and reading it may run code. The message
    names the file."""


def read_table(path: str | Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a Parquet file. Page checksums are verified if the file has them.

    Raises:
        ExtensionTypeError: a column is of an Arrow extension type.
        pa.ArrowInvalid, OSError: the file is damaged, not Parquet, or not a regular file.
    """
    with _opened(path) as file:
        if columns is None:  # pyarrow's read_table takes half as long again, and reads the same
            return pa.parquet.ParquetFile(file, page_checksum_verification=True).read()
        return pa.parquet.read_table(file, columns=list(columns), page_checksum_verification=True)


def stream_table(
    path: str | Path, rows: int, columns: Container[str] | None = None
) -> Iterator[tuple[tuple[str, ...], pa.Table]]:
    """The rows of a Parquet file in tables of at most `rows` rows, one at a time, with the names of
    all columns of the file. Raises like `read_table`.

    Args:
        columns: the columns to read, where the file has them; None = all. If it has none of them,
            its first column is read.
    """
    with _opened(path) as file:
        whole = pa.parquet.ParquetFile(file, page_checksum_verification=True)
        names = tuple(whole.schema_arrow.names)
        wanted = [name for name in names if columns is None or name in columns]
        wanted = wanted or [*names[:1]]  # a table without columns would have no rows
        for batch in whole.iter_batches(batch_size=rows, columns=wanted):
            yield names, pa.Table.from_batches([batch])


def read_schema(path: str | Path) -> pa.Schema:
    """The schema of a Parquet file, with its metadata. Raises like `read_table`."""
    with _opened(path) as file:
        return pa.parquet.read_schema(file)


def write_table(table: pa.Table, path: Path) -> None:
    """Write a complete Parquet file with page checksums, under a temporary name that is then
    renamed.

    Raises:
        EscapesDirectoryError, NotAFileError, DiskFullError: see
            `asyncrl.runtime.files.opening.replacing`.
    """
    with replacing(path) as file:
        pa.parquet.write_table(table, file, compression="zstd", write_page_checksum=True)


def _opened(path: str | Path) -> BinaryIO:
    """The open file, after the check of its footer for extension types."""
    file = open_regular(Path(path))
    try:
        if _has_extension_type(_footer(file, path)):
            raise ExtensionTypeError(
                f"{path} has a column of an Arrow extension type, which may run code when it is"
                " read; write it with plain types"
            )
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _footer(file: BinaryIO, path: str | Path) -> bytes:
    size = file.seek(0, 2)
    if size < TAIL + len(MAGIC):
        raise pa.ArrowInvalid(f"{path} has {size} bytes, too few for a Parquet file")
    file.seek(size - TAIL)
    tail = file.read(TAIL)
    length = int.from_bytes(tail[:4], "little")
    if tail[4:] != MAGIC or length > min(size - TAIL, LARGEST_FOOTER):
        raise pa.ArrowInvalid(
            f"{path} does not end like a Parquet file: it is another kind of file, or was truncated"
        )
    file.seek(size - TAIL - length)
    return file.read(length)


def _has_extension_type(footer: bytes) -> bool:
    """Whether a base64 text in the footer is an Arrow schema with an extension type. The text may
    start anywhere in a run of base64 characters."""
    for run in STORED_SCHEMA.findall(footer):
        for start in range(4):
            text = run[start:].rstrip(b"=")
            if EXTENSION in base64.b64decode(text[: len(text) // 4 * 4]):
                return True
    return False
