"""Arrow IPC files that are written block by block and read through a memory map, so neither needs
memory for the whole table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from asyncrl.runtime.files import replacing

__all__ = ["batch_writer", "map_table", "write_batches"]


@contextmanager
def batch_writer(path: Path, schema: pa.Schema) -> Iterator[pa.ipc.RecordBatchFileWriter]:
    """A writer of a file that appears when the block ends without an error. Otherwise no file is
    left, and an older one stays.

    Raises:
        EscapesDirectoryError, NotAFileError, DiskFullError: see `asyncrl.runtime.files.replacing`.
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
