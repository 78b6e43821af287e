"""Files of token rows."""

import pyarrow as pa
import pytest

from asyncrl.contracts.offline_rows import SFT_SCHEMA, token_table
from asyncrl.data.token_file import open_token_file
from asyncrl.runtime.files.arrow_files import write_batches

BLOCK_ROWS = 700


def written(path, blocks=3, rows=700, metadata=None):
    schema = SFT_SCHEMA.with_metadata(metadata)
    batches = (
        batch.replace_schema_metadata(metadata)
        for block in range(blocks)
        for batch in token_table([([block], [row, 2]) for row in range(rows)]).to_batches()
    )
    write_batches(path, schema, batches)
    return open_token_file(path)


def test_rows_come_back_in_the_order_asked_for(tmp_path):
    file = written(tmp_path / "rows.arrow", rows=BLOCK_ROWS + 10, metadata={b"k": b"v"})
    assert file.rows == 3 * (BLOCK_ROWS + 10) and file.metadata == {b"k": b"v"}
    last = file.rows - 1
    taken = file.take([last, 0, BLOCK_ROWS + 10, 0])
    assert taken["input_ids"].to_pylist() == [
        [2, BLOCK_ROWS + 9, 2],
        [0, 0, 2],
        [1, 0, 2],
        [0, 0, 2],
    ]
    assert taken.schema == SFT_SCHEMA and taken["input_ids"].num_chunks == 1


@pytest.mark.parametrize("row", [-1, 2100])
def test_a_row_that_does_not_exist_is_refused(tmp_path, row):
    with pytest.raises(IndexError, match=f"row {row} of .*, which has 2100 rows"):
        written(tmp_path / "rows.arrow").take([row])


def test_a_damaged_file_counts_as_missing(tmp_path):
    path = tmp_path / "rows.arrow"
    written(path)
    path.write_bytes(path.read_bytes()[:-40])
    assert open_token_file(path) is None


def test_the_content_hash_follows_the_content(tmp_path):
    first, same = written(tmp_path / "a.arrow"), written(tmp_path / "b.arrow")
    other = written(tmp_path / "c.arrow", blocks=2)
    assert first.content_hash == same.content_hash != other.content_hash


def test_reading_takes_little_memory(tmp_path):
    path = tmp_path / "rows.arrow"
    batches = (
        batch
        for _ in range(20)
        for batch in token_table([(list(range(500)), [1])] * BLOCK_ROWS).to_batches()
    )
    write_batches(path, SFT_SCHEMA, batches)
    before = pa.total_allocated_bytes()
    file = open_token_file(path)
    assert file is not None and file.rows == 20 * BLOCK_ROWS
    assert pa.total_allocated_bytes() - before < 4 << 20
