"""Reading Parquet never runs code, and a changed page is an error."""

import base64
import os
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import asyncrl
from asyncrl.runtime.files.opening import NotAFileError
from asyncrl.runtime.files.parquet import ExtensionTypeError, read_schema, read_table, write_table

PACKAGE = Path(asyncrl.__file__).parent


class Touch:
    """Creates a file when unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def dangerous(path, marker):
    """A file with a column that Ray unpickles."""
    from ray.data._internal.object_extensions.arrow import ArrowPythonObjectType

    kind = ArrowPythonObjectType()
    column = pa.ExtensionArray.from_storage(
        kind, pa.array([pickle.dumps(Touch(marker))], kind.storage_type)
    )
    pq.write_table(pa.table({"attempt": [0], "ordinal": [0], "extra": column}), path)


@pytest.fixture
def marker(tmp_path):
    """A file that must not be created."""
    yield tmp_path / "executed"
    assert not (tmp_path / "executed").exists(), "something ran the code of a file"


def test_round_trip(tmp_path):
    table = pa.table({"a": [1, None, 3], "b": [["x"], [], None]}).replace_schema_metadata(
        {"key": "value"}
    )
    write_table(table, tmp_path / "file.parquet")
    found = read_table(tmp_path / "file.parquet")
    assert (
        found.equals(table)
        and found.schema.metadata
        == {b"key": b"value"}
        == read_schema(tmp_path / "file.parquet").metadata
    )
    assert read_table(tmp_path / "file.parquet", ["b"]).column_names == ["b"]


def test_an_extension_type_is_refused_before_pyarrow_reads_it(tmp_path, marker):
    dangerous(tmp_path / "file.parquet", marker)
    for read in (read_table, read_schema):
        with pytest.raises(
            ExtensionTypeError, match=r"file\.parquet has a column of an Arrow extension type"
        ):
            read(tmp_path / "file.parquet")


def test_a_stored_schema_is_found_at_any_alignment(tmp_path, marker):
    """A length field in front of the schema may look like base64 and shift the decoded text."""
    from asyncrl.runtime.files.parquet import _has_extension_type

    dangerous(tmp_path / "file.parquet", marker)
    stored = pq.read_metadata(tmp_path / "file.parquet").metadata[b"ARROW:schema"]
    for before in (b"", b"A", b"AB", b"ABC", b"\x00"):
        assert _has_extension_type(before + stored + b"\x19")
    assert not _has_extension_type(base64.b64encode(os.urandom(4096)))


def test_every_file_of_a_run_is_read_safely(tmp_path, marker):
    """Groups, outcomes, and the waiting groups of a checkpoint."""
    from asyncrl.rewards.scoring import RayScores

    for folder in ("groups", "outcomes"):
        (tmp_path / folder).mkdir()
        dangerous(tmp_path / folder / "attempt_0000-00000000.parquet", marker)
    (tmp_path / "config.yaml").write_text("")
    run = asyncrl.open_run(tmp_path)
    for read in (run.groups, run.outcomes, run.trajectories):
        with pytest.raises(ExtensionTypeError):
            read()
    dangerous(tmp_path / "buffer.parquet", marker)
    with pytest.raises(ExtensionTypeError):
        RayScores._load(None, tmp_path / "buffer.parquet")


def test_nothing_else_reads_or_writes_parquet():
    users = {
        path.name
        for path in PACKAGE.rglob("*.py")
        if "pyarrow.parquet" in path.read_text() or "ParquetFile" in path.read_text()
    }
    assert users == {"parquet.py"}


def test_a_changed_byte_of_a_page_is_an_error(tmp_path):
    path = tmp_path / "file.parquet"
    write_table(pa.table({"a": pa.array(range(1000), pa.int64()), "b": ["text"] * 1000}), path)
    whole = path.read_bytes()
    pages = pq.read_metadata(path).row_group(0).column(0).total_compressed_size
    changed = 0
    for at in range(4, 4 + pages, 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            same = read_table(path).equals(pq.read_table(pa.BufferReader(whole)))
        except OSError:
            changed += 1
        else:
            assert same, f"byte {at} changed the table without an error"
    assert changed > 10


@pytest.mark.parametrize(
    "content", [b"", b"PAR1", b"PAR1PAR1", b"PAR1" + b"\xff" * 4 + b"PAR1", b"x" * 100]
)
def test_a_file_that_is_not_parquet_is_an_error(tmp_path, content):
    (tmp_path / "file.parquet").write_bytes(content)
    with pytest.raises(pa.ArrowInvalid):
        read_table(tmp_path / "file.parquet")


def test_a_pipe_does_not_make_a_reader_wait(tmp_path):
    os.mkfifo(tmp_path / "file.parquet")
    with pytest.raises(NotAFileError, match="is a named pipe"):
        read_table(tmp_path / "file.parquet")
