"""Arrow files that are complete or absent, and read through a memory map."""

import os

import pyarrow as pa
import pytest

from asyncrl.runtime.files.arrow_files import map_table, write_batches
from asyncrl.runtime.files.opening import DiskFullError

SCHEMA = pa.schema([("number", pa.int64())])


def batches(count):
    for number in range(count):
        yield pa.record_batch({"number": range(number, number + 1000)}, SCHEMA)


def test_batches_are_read_back_without_a_copy(tmp_path):
    path = tmp_path / "new" / "table.arrow"
    write_batches(path, SCHEMA, batches(100))
    before = pa.total_allocated_bytes()
    table = map_table(path)
    assert table.num_rows == 100_000 and table["number"][99_999].as_py() == 1098
    assert pa.total_allocated_bytes() - before < 10_000
    assert len(table.to_batches()) == 100


def test_a_table_without_rows_is_a_table(tmp_path):
    write_batches(tmp_path / "t", SCHEMA, [])
    assert map_table(tmp_path / "t") == SCHEMA.empty_table()


def test_a_failure_leaves_the_old_file(tmp_path, full_disk):
    path = tmp_path / "table.arrow"
    write_batches(path, SCHEMA, batches(1))

    def failing():
        yield from batches(2)
        raise RuntimeError("no more rows")

    with pytest.raises(RuntimeError, match="no more rows"):
        write_batches(path, SCHEMA, failing())
    with full_disk(5000), pytest.raises((DiskFullError, OSError)):
        write_batches(path, SCHEMA, batches(100))
    assert map_table(path).num_rows == 1000 and os.listdir(tmp_path) == ["table.arrow"]


@pytest.mark.parametrize("kept", [0, 3, 100, -1])
def test_an_incomplete_file_is_refused(tmp_path, kept):
    path = tmp_path / "table.arrow"
    write_batches(path, SCHEMA, batches(1))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"table.arrow is not a complete Arrow file"):
        map_table(path)
    with pytest.raises(FileNotFoundError):
        map_table(tmp_path / "none.arrow")
