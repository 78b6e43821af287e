"""Arrow IPC files that are written block by block and read through a memory map, so neither needs
memory for the whole table; and those of other programs."""

from __future__ import annotations

import io
import struct
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from asyncrl.runtime.files.opening import open_regular, replacing
from asyncrl.runtime.files.parquet import EXTENSION, ExtensionTypeError

MAGIC = b"ARROW1"
CONTINUES = b"\xff\xff\xff\xff"


@contextmanager
def batch_writer(path: Path, schema: pa.Schema) -> Iterator[pa.ipc.RecordBatchFileWriter]:
    """A writer of a file that appears when the block ends without an error. Otherwise no file is
    left, and an older one stays.

    Raises:
        EscapesDirectoryError, NotAFileError, DiskFullError: see
            `asyncrl.runtime.files.opening.replacing`.
    """
    with replacing(path) as file, pa.ipc.new_file(file, schema) as writer:
        yield writer


def write_batches(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Write a complete file, as `batch_writer` does."""
    with batch_writer(path, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def map_table(path: Path) -> pa.Table:
    """The table of a file. Its columns stay on the disk until they are used.

    Raises:
        ValueError: the file is not a complete Arrow IPC file.
        OSError: it cannot be read.
    """
    with pa.memory_map(str(path)) as file:
        try:
            return pa.ipc.open_file(file).read_all()
        except pa.ArrowException as error:
            why = " ".join(str(error).split())
            raise ValueError(f"{path} is not a complete Arrow file ({why}); remove it") from None


def stream_arrow(
    path: Path, rows: int, columns: Container[str] | None = None
) -> Iterator[tuple[tuple[str, ...], pa.Table]]:
    """The rows of an Arrow IPC file or stream, such as those of `datasets.save_to_disk`, in tables
    of at most `rows` rows, with the names of all columns of the file.

    Args:
        columns: the columns to read, where the file has them; None = all. If it has none of them,
            its first column is read.

    Raises:
        ExtensionTypeError: a column is of an Arrow extension type.
        pa.ArrowInvalid, OSError: the file is damaged, not Arrow, or not a regular file.
    """
    with open_regular(path) as file:
        is_file = file.read(len(MAGIC)) == MAGIC
        # pyarrow instantiates extension types as it reads a schema, and some of them run code.
        if any(EXTENSION in schema for schema in _schemas(file, is_file)):
            raise ExtensionTypeError(
                f"{path} has a column of an Arrow extension type, which may run code when it is"
                " read; write it with plain types"
            )
        file.seek(0)
        reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        names = tuple(reader.schema.names)
        wanted = [name for name in names if columns is None or name in columns] or [*names[:1]]
        batches = (
            (reader.get_batch(number) for number in range(reader.num_record_batches))
            if is_file
            else iter(reader)
        )
        for batch in batches:
            table = pa.Table.from_batches([batch]).select(wanted)
            for start in range(0, table.num_rows, rows):
                yield names, table.slice(start, rows)


def _schemas(file: BinaryIO, is_file: bool) -> Iterator[bytes]:
    """The bytes that describe the columns: those at the start, and the footer of a file."""
    file.seek(8 if is_file else 0)
    word = file.read(4)
    size = struct.unpack("<i", (file.read(4) if word == CONTINUES else word).ljust(4, b"\0"))[0]
    yield file.read(max(size, 0))
    if is_file:
        end = file.seek(0, io.SEEK_END)
        file.seek(max(end - len(MAGIC) - 4, 0))
        length = struct.unpack("<i", file.read(4).ljust(4, b"\0"))[0]
        file.seek(max(end - len(MAGIC) - 4 - max(length, 0), 0))
        yield file.read(max(length, 0))
