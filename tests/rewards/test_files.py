import pyarrow as pa
import pyarrow.parquet

from asyncrl.rewards.files import compact, flush_path, next_flush, read_groups, write_groups


def rows(attempt, ordinals, note):
    return pa.table({"attempt": [attempt] * len(ordinals), "ordinal": ordinals, "note": pa.array([note] * len(ordinals))})


def test_a_flush_is_complete_or_not_there(tmp_path):
    write_groups(flush_path(tmp_path, 1, 0), [rows(1, [0], "a"), rows(1, [1], None)])
    assert [path.name for path in tmp_path.iterdir()] == ["attempt_0001-00000000.parquet"]
    assert pyarrow.parquet.read_table(tmp_path / "attempt_0001-00000000.parquet")["note"].to_pylist() == ["a", None]
    assert (next_flush(tmp_path, 1), next_flush(tmp_path, 2)) == (1, 0)


def test_compaction_leaves_every_group_once(tmp_path):
    for flush, ordinals in enumerate(([0, 1], [2], [1, 3])):
        write_groups(flush_path(tmp_path, 1, flush), [rows(1, ordinals, "first")])
    write_groups(flush_path(tmp_path, 2, 0), [rows(2, [1], "second")])
    assert compact(tmp_path) == 2
    assert next_flush(tmp_path, 1) == 3
    table = read_groups(tmp_path)
    keys = sorted(zip(table["attempt"].to_pylist(), table["ordinal"].to_pylist(), strict=True))
    assert keys == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 1)]
    assert compact(tmp_path) == 2


def test_an_empty_directory_has_no_groups(tmp_path):
    assert read_groups(tmp_path) is None and compact(tmp_path) == 0
