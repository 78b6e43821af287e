import os

import pyarrow as pa
import pyarrow.parquet
import pytest

from asyncrl.rewards.files import FlushFiles, compact
from asyncrl.runtime.files.merging import MERGE_EVERY


def rows(attempt, ordinals, note="note"):
    return pa.table(
        {
            "attempt": [attempt] * len(ordinals),
            "ordinal": ordinals,
            "note": pa.array([note] * len(ordinals)),
        }
    )


def keys(directory):
    table = pyarrow.parquet.read_table(directory)
    return sorted(zip(table["attempt"].to_pylist(), table["ordinal"].to_pylist(), strict=True))


def test_a_flush_is_one_complete_file(tmp_path):
    path = FlushFiles(tmp_path, 1).write([rows(1, [0], "a"), rows(1, [1], None)])
    assert list(tmp_path.iterdir()) == [path] and path.name == "attempt_0001-00000000.parquet"
    assert pyarrow.parquet.read_table(path)["note"].to_pylist() == ["a", None]
    assert FlushFiles(tmp_path, 1).write([rows(1, [2])]).name == "attempt_0001-00000001.parquet"


def test_a_full_disk_leaves_no_partial_file(tmp_path, full_disk):
    files = FlushFiles(tmp_path, 1)
    first = files.write([rows(1, [0])])
    incompressible = rows(1, list(range(1, 400))).set_column(
        2, "note", pa.array([os.urandom(200).hex() for _ in range(399)])
    )
    with full_disk(20_000), pytest.raises(OSError, match="File too large"):
        files.write([incompressible])
    assert list(tmp_path.iterdir()) == [first] and keys(tmp_path) == [(1, 0)]
    files.write([incompressible])
    assert len(keys(tmp_path)) == 400


def test_flushes_are_merged_during_the_run(tmp_path):
    files = FlushFiles(tmp_path, 1)
    for flush in range(MERGE_EVERY + 1):
        files.write([rows(1, [flush])])
    assert len(list(tmp_path.iterdir())) == 2
    assert keys(tmp_path) == [(1, flush) for flush in range(MERGE_EVERY + 1)]


def test_compaction_leaves_every_group_of_every_attempt_once(tmp_path):
    for attempt, flushes in ((1, ([0, 1], [2], [1, 3])), (2, ([1],))):
        files = FlushFiles(tmp_path, attempt)
        for ordinals in flushes:
            files.write([rows(attempt, ordinals)])
    assert compact(tmp_path) == compact(tmp_path) == 2
    assert keys(tmp_path) == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 1)]


def test_an_empty_directory_needs_no_compaction(tmp_path):
    assert compact(tmp_path) == 0
