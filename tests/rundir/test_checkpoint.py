"""Checkpoints: committed or ignored, verified when read, and rotated."""

import asyncio
import errno
import json
import os
import threading
import zlib

import pytest

from asyncrl.contracts.errors import NoCheckpointError, UnreadableCheckpointError
from asyncrl.contracts.messages import Scored
from asyncrl.contracts.state import State
from asyncrl.rundir.checkpoint import CheckpointStore
from asyncrl.runtime.files.opening import DiskFullError
from asyncrl.runtime.files.shared import NotSharedError, wait_until_seen
from asyncrl.testing import FakeLearner, FakeRollouts, FakeScores

GROUP = Scored(9, 1, None, 4, (0.0, 1.0), {"exact": 0.5}, 2, 0)


class Learner(FakeLearner):
    async def save(self, directory):
        (directory / "weights").write_bytes(b"1234")
        return {"weights": (4, zlib.crc32(b"1234"))}


def write(checkpoints, version, learner=None, waiting=()):
    state = State(
        "run",
        0,
        version,
        version,
        8,
        (10, 12),
        waiting=tuple((0, group.ordinal) for group in waiting),
    )
    return asyncio.run(
        checkpoints.write(state, waiting, learner or Learner(1), FakeScores(FakeRollouts()))
    )


def flip(path, place=0):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_round_trip_and_rotation(tmp_path):
    checkpoints = CheckpointStore(tmp_path, keep=2)
    for version in (1, 2, 3):
        write(checkpoints, version, waiting=[GROUP])
    path, state, passed_over = checkpoints.find()
    assert state == State("run", 0, 3, 3, 8, (10, 12), waiting=((0, 9),)) and not passed_over
    assert (path / "learner" / "weights").read_bytes() == b"1234"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "step_000002", "step_000003"]
    assert (tmp_path / "LATEST").read_text().startswith("step_000003 ")
    assert asyncio.run(FakeScores(FakeRollouts()).load(path / "buffer.parquet")) == [GROUP]
    assert set(json.loads((path / "MANIFEST").read_text())) == {
        "learner/weights",
        "buffer.parquet",
        "config.yaml",
        "state.json",
    }


def test_a_missing_checkpoint_differs_from_an_unreadable_one(tmp_path):
    checkpoints = CheckpointStore(tmp_path, keep=2)
    with pytest.raises(NoCheckpointError, match="no committed checkpoint"):
        checkpoints.find()
    path = write(checkpoints, 1)
    flip(path / "learner" / "weights")
    with pytest.raises(
        UnreadableCheckpointError, match=r"damaged: learner/weights.*start a new run"
    ):
        checkpoints.find()
    (path / "learner" / "weights").unlink()
    with pytest.raises(UnreadableCheckpointError, match="cannot be read"):
        checkpoints.find()


@pytest.mark.parametrize(
    "file", ["learner/weights", "buffer.parquet", "state.json", "MANIFEST", "COMMITTED"]
)
def test_a_flipped_bit_falls_back_to_the_previous_checkpoint_with_a_note(tmp_path, file):
    checkpoints = CheckpointStore(tmp_path, keep=3)
    for version in (1, 2):
        path = write(checkpoints, version, waiting=[GROUP])
    for place in (0, (path / file).stat().st_size // 2):
        flip(path / file, place)
        found, state, passed_over = checkpoints.find()
        assert (
            (found.name, state.version) == ("step_000001", 1)
            and len(passed_over) == 1
            and "step_000002" in passed_over[0]
        )
        flip(path / file, place)
    assert checkpoints.find()[1].version == 2


@pytest.mark.parametrize(("file", "content"), [("learner/weights", b"123"), ("COMMITTED", b"")])
def test_a_truncated_file_counts_as_damaged(tmp_path, file, content):
    checkpoints = CheckpointStore(tmp_path, keep=3)
    write(checkpoints, 1)
    path = write(checkpoints, 2)
    (path / file).write_bytes(content)
    assert checkpoints.find()[1].version == 1


def test_a_damaged_latest_is_reported_and_the_newest_checkpoint_is_used(tmp_path):
    checkpoints = CheckpointStore(tmp_path, keep=3)
    for version in (1, 2):
        write(checkpoints, version)
    checkpoints.point_at("step_000001")
    assert checkpoints.find()[1].version == 1 and not checkpoints.find()[2]

    def assert_reported():
        _, state, passed_over = checkpoints.find()
        assert (
            state.version == 2
            and "LATEST is missing or damaged; using the newest committed checkpoint"
            in passed_over[0]
        )

    for place in range((tmp_path / "LATEST").stat().st_size):
        flip(tmp_path / "LATEST", place)
        assert_reported()
        flip(tmp_path / "LATEST", place)
    (tmp_path / "LATEST").write_bytes(b"\xff\x00../..")
    assert_reported()
    (tmp_path / "LATEST").unlink()
    assert_reported()
    checkpoints.point_at("step_000009")
    assert "names 'step_000009', which is not a committed checkpoint" in checkpoints.find()[2][0]


def test_a_manifest_cannot_name_files_outside_the_checkpoint(tmp_path):
    checkpoints = CheckpointStore(tmp_path / "run", keep=3)
    path = write(checkpoints, 1)
    (tmp_path / "secret").write_text("x")
    text = json.dumps({"../../secret": [1, 2363233923]})
    (path / "MANIFEST").write_text(text)
    (path / "COMMITTED").write_text(str(zlib.crc32(text.encode())))
    with pytest.raises(UnreadableCheckpointError, match="which is outside"):
        checkpoints.find()


def test_a_requested_step_is_found(tmp_path):
    checkpoints = CheckpointStore(tmp_path, keep=3)
    for version in (1, 2, 3):
        write(checkpoints, version)
    assert checkpoints.find(2)[1].version == 2
    with pytest.raises(NoCheckpointError, match=r"of step 7 \(there are: 3, 2, 1\)"):
        checkpoints.find(7)


def test_after_going_back_the_abandoned_line_is_not_used(tmp_path):
    checkpoints = CheckpointStore(tmp_path, keep=3)
    for version in (1, 2, 3):
        write(checkpoints, version)
    checkpoints.point_at("step_000001")
    assert checkpoints.find()[1].version == 1
    write(checkpoints, 2)
    path, state, _ = checkpoints.find()
    assert state.version == 2
    flip(path / "learner" / "weights")
    assert checkpoints.find()[1].version == 1, (
        "the abandoned checkpoint has a higher number, but belongs to another line"
    )


def test_a_failed_save_keeps_the_previous_checkpoint(tmp_path):
    checkpoints = CheckpointStore(tmp_path, keep=2)
    write(checkpoints, 1)

    class Full(Learner):
        async def save(self, directory):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write(checkpoints, 2, Full(1))
    assert checkpoints.find()[1].version == 1


def test_a_write_error_keeps_the_previous_checkpoint_and_no_partial_one(tmp_path, full_disk):
    class Large(Learner):
        async def save(self, directory):
            (directory / "weights").write_bytes(bytes(100_000))
            return {"weights": (100_000, zlib.crc32(bytes(100_000)))}

    checkpoints = CheckpointStore(tmp_path, keep=2)
    write(checkpoints, 1)
    (tmp_path / ".step_000002.77").mkdir()  # left by a killed process
    with full_disk(50_000), pytest.raises(OSError, match="File too large"):
        write(checkpoints, 2, Large(1))
    assert (
        sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step_000001"]
        and checkpoints.find()[1].version == 1
    )
    write(checkpoints, 2, Large(1))
    assert checkpoints.find()[1].version == 2


async def test_the_event_loop_is_free_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    checkpoints, started, proceed = (
        CheckpointStore(tmp_path, keep=2),
        threading.Event(),
        threading.Event(),
    )
    commit = checkpoints._commit
    signals = []

    def commit_after_signal(*arguments):
        started.set()
        signals.append(proceed.wait(10))
        commit(*arguments)

    monkeypatch.setattr(checkpoints, "_commit", commit_after_signal)

    writing = asyncio.create_task(
        checkpoints.write(State("run", 0, 1, 1, 8, ()), [], Learner(1), FakeScores(FakeRollouts()))
    )
    await asyncio.to_thread(started.wait, 10)
    proceed.set()
    found = await writing
    assert found.name == "step_000001" and signals == [True], (
        "the event loop signaled during the write"
    )


def test_rotation_deletes_checkpoints_and_nothing_else(tmp_path):
    """Other entries of the folder do not belong to asyncrl, even under similar names."""
    foreign = [
        "step_backup",
        "step_1x",
        ".step_000001.copy",
        ".step_000009",
        ".replaced.by_hand",
        "step_000001_kept",
        "step_²",
        "step_٠",
        ".step_٠.٠",
    ]
    checkpoints = CheckpointStore(tmp_path, keep=1)
    for name in foreign:
        (tmp_path / name).mkdir()
        (tmp_path / name / "COMMITTED").write_text("mine")
    (tmp_path / ".step_000001.4711").mkdir()
    for version in (1, 2, 3):
        write(checkpoints, version)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [*foreign, "LATEST", "step_000003"]
    )
    assert checkpoints.versions() == [3]


def test_an_old_checkpoint_in_use_is_deleted_later(tmp_path, monkeypatch):
    """On network storage a folder with open files is never empty, such as while a user copies
    it."""
    checkpoints, remove = CheckpointStore(tmp_path, keep=1), os.rmdir

    def in_use(path, **place):
        if str(path).endswith("learner"):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        remove(path, **place)

    write(checkpoints, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", in_use)
        write(checkpoints, 2)
        assert checkpoints.versions() == [2], "a partly deleted checkpoint does not count"
    write(checkpoints, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step_000003"]


@pytest.mark.parametrize("part", ["learner", "buffer.parquet", "MANIFEST"])
def test_a_full_disk_leaves_no_partial_checkpoint(tmp_path, monkeypatch, part):
    checkpoints = CheckpointStore(tmp_path, keep=2)
    write(checkpoints, 1)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    class Full(Learner):
        async def save(self, directory):
            saved = await super().save(directory)
            if part == "learner":
                full()
            return saved

    if part == "buffer.parquet":
        monkeypatch.setattr(FakeScores, "save", full)
    if part == "MANIFEST":
        sync = os.fsync
        monkeypatch.setattr(
            os,
            "fsync",
            lambda file: (
                full() if "MANIFEST" in os.readlink(f"/proc/self/fd/{file}") else sync(file)
            ),
        )
    with pytest.raises(
        DiskFullError,
        match=r"step_000002.* cannot be written: [\d,]+ bytes are free on its file system",
    ):
        write(checkpoints, 2, Full(1), waiting=[GROUP])
    assert (
        sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step_000001"]
        and checkpoints.find()[1].version == 1
    )


def test_a_pipe_in_place_of_a_file_counts_as_damage_and_does_not_block(tmp_path):
    checkpoints = CheckpointStore(tmp_path, keep=2)
    path = write(checkpoints, 1)
    for name in ("state.json", "MANIFEST", "learner/weights"):
        whole = (path / name).read_bytes()
        (path / name).unlink()
        os.mkfifo(path / name)
        with pytest.raises(UnreadableCheckpointError, match="is a named pipe"):
            checkpoints.find()
        (path / name).unlink()
        (path / name).write_bytes(whole)


class Elsewhere(Learner):
    """A learner whose ranks wrote to a local disk of another node."""

    async def save(self, directory):
        return {"weights": (4, zlib.crc32(b"1234"))}


def test_files_invisible_to_the_driver_are_not_committed_and_older_checkpoints_stay(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(wait_until_seen, "__defaults__", (0.2,))
    checkpoints = CheckpointStore(tmp_path, keep=1)
    write(checkpoints, 1)
    with pytest.raises(
        NotSharedError,
        match=(
            r"learner/weights was written with 4 bytes on another node, and here nothing is there"
            r" .* storage that every node"
        ),
    ):
        write(checkpoints, 2, Elsewhere(1))
    assert (
        sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step_000001"]
        and checkpoints.find()[1].version == 1
    )


def test_a_partly_visible_file_is_not_committed(tmp_path, monkeypatch):
    monkeypatch.setattr(wait_until_seen, "__defaults__", (0.2,))

    class Part(Learner):
        async def save(self, directory):
            await super().save(directory)
            return {"weights": (5, 0)}

    with pytest.raises(NotSharedError, match="here 4 bytes are there"):
        write(CheckpointStore(tmp_path, keep=1), 2, Part(1))
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_has_the_ranks_checksums_and_detects_a_bit_that_flipped_on_the_way(
    tmp_path,
):
    class Flipped(Learner):
        async def save(self, directory):
            (directory / "weights").write_bytes(b"1235")
            return {"weights": (4, zlib.crc32(b"1234"))}

    checkpoints = CheckpointStore(tmp_path, keep=2)
    write(checkpoints, 1)
    write(checkpoints, 2, Flipped(1))
    found, _, passed_over = checkpoints.find()
    assert (
        found.name == "step_000001"
        and "learner/weights does not match its MANIFEST" in passed_over[0]
    )


def test_directory_entries_of_the_ranks_files_are_synced_before_committed(tmp_path, monkeypatch):
    """After a power failure a synced file keeps its content but may lose its directory entry."""

    class Deep(Learner):
        async def save(self, directory):
            (directory / "zero3").mkdir()
            (directory / "zero3" / "shard").write_bytes(b"1234")
            return {"zero3/shard": (4, zlib.crc32(b"1234"))}

    synced, sync = [], os.fsync

    def record(descriptor):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    write(CheckpointStore(tmp_path, keep=2), 1, Deep(1))
    committed = next(place for place, name in enumerate(synced) if "COMMITTED" in name)
    assert {"learner", "zero3"} <= set(synced[:committed])


def test_stale_entries_of_a_network_file_system_are_checked_again(tmp_path, monkeypatch):
    looks, stat = iter([errno.ESTALE, errno.ENOTDIR, errno.ENOENT]), os.stat
    (tmp_path / "weights").write_bytes(b"1234")

    def stale(path, *arguments, **options):
        if str(path).endswith("weights") and (why := next(looks, None)):
            raise OSError(why, os.strerror(why))
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", stale)
    wait_until_seen(tmp_path, {"weights": 4}, "", 20)
    assert next(looks, None) is None
