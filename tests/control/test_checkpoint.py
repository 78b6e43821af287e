"""Committed or not there: what a resume finds."""

import asyncio

import pytest

from asyncrl.control.checkpoint import Checkpoints, NoCheckpoint, State, UnreadableCheckpoint


async def save(directory):
    (directory / "weights").write_bytes(b"1234")


def write(checkpoints, version):
    return asyncio.run(checkpoints.write(State("run", 0, version, version, 8, (10, 12)), save))


def test_round_trip_and_the_last_k(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for version in (1, 2, 3):
        write(checkpoints, version)
    path, state = checkpoints.latest()
    assert state == State("run", 0, 3, 3, 8, (10, 12)) and (path / "learner" / "weights").read_bytes() == b"1234"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["LATEST", "step_000002", "step_000003"]
    assert (tmp_path / "LATEST").read_text() == "step_000003"


def test_none_is_not_unreadable(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    with pytest.raises(NoCheckpoint, match="no committed checkpoint"):
        checkpoints.latest()
    path = write(checkpoints, 1)
    (path / "learner" / "weights").write_bytes(b"12x4")
    with pytest.raises(UnreadableCheckpoint, match="damaged: learner/weights"):
        checkpoints.latest()
    (path / "learner" / "weights").unlink()
    with pytest.raises(UnreadableCheckpoint, match="cannot be read"):
        checkpoints.latest()


def test_a_save_that_failed_leaves_the_one_before(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    write(checkpoints, 1)

    async def fails(directory):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        asyncio.run(checkpoints.write(State("run", 0, 2, 2, 8, ()), fails))
    assert checkpoints.latest()[1].version == 1
