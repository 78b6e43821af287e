"""Files that nodes share: checksums computed while writing, and visibility on other nodes."""

import threading
import zlib

import pytest
import torch

from asyncrl.runtime.files.shared import (
    NotSharedError,
    Probe,
    answer_probe,
    size_and_checksum,
    sync_directory,
    wait_until_seen,
    write_summed,
)


def test_the_checksum_computed_while_writing_is_that_of_the_file(tmp_path):
    state = {"weights": torch.arange(300_000, dtype=torch.float64).view(3, -1), "step": 7}
    written = write_summed(tmp_path / "state.pt", lambda file: torch.save(state, file))
    content = (tmp_path / "state.pt").read_bytes()
    assert (
        written == (len(content), zlib.crc32(content)) == size_and_checksum(tmp_path / "state.pt")
    )
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(loaded["weights"], state["weights"]) and loaded["step"] == 7


def test_any_buffer_is_checksummed_by_its_bytes(tmp_path):
    array = torch.arange(10, dtype=torch.int32).numpy()
    assert write_summed(tmp_path / "a", lambda file: (file.write(array), file.write(b"ab"))) == (
        42,
        zlib.crc32(array.tobytes() + b"ab"),
    )


def test_waits_for_a_file_that_becomes_visible_late(tmp_path):
    def write():
        (tmp_path / "late").write_bytes(b"1234")

    writer = threading.Timer(0.2, write)
    writer.start()
    wait_until_seen(tmp_path, {"late": 4}, "share it", within_s=30)
    writer.join()


def test_a_file_that_stays_invisible_is_named(tmp_path):
    (tmp_path / "short").write_bytes(b"12")
    with pytest.raises(
        NotSharedError,
        match=(
            r"short was written with 1,234 bytes on another node, and here 2 bytes are there after"
            r" 0.1 s; share it"
        ),
    ):
        wait_until_seen(tmp_path, {"short": 1234}, "share it", within_s=0.1)


def test_a_probe_is_answered_where_its_folder_is_visible_and_is_removed(tmp_path):
    with Probe(tmp_path) as probe:
        assert answer_probe(probe.folder, "rank_0") and probe.seen("rank_0")
        assert not probe.seen("rank_1", within_s=0.1)
        assert not answer_probe(tmp_path / "another" / probe.folder.name, "rank_1", within_s=0.1)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_and_everything_below_it_is_synced(tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("x")
    synced = []
    monkeypatch.setattr(
        "asyncrl.runtime.files.shared.sync_file", lambda path: synced.append(path.name)
    )
    sync_directory(tmp_path / "a")
    assert sorted(synced) == ["a", "b", "file"]
