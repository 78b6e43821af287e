"""What the tests of whole runs count as left behind in shared memory."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from run_process import RunProcess, mapped_files


@pytest.fixture
def ended_run(tmp_path: Path) -> RunProcess:
    run = RunProcess(tmp_path / "no.yaml", tmp_path / "run.log", [], dict(os.environ))
    run.wait(60)
    return run


def test_a_semaphore_is_found_by_the_process_that_has_it(ended_run: RunProcess) -> None:
    """Its path in the process is the one that it had before its own name."""
    before = {path.stat().st_ino for path in Path("/dev/shm").glob("sem.mp-*")}
    semaphore = multiprocessing.get_context("forkserver").Semaphore(1)
    made = [path for path in Path("/dev/shm").glob("sem.mp-*") if path.stat().st_ino not in before]
    assert {path.stat().st_ino for path in made} & mapped_files(os.getpid())

    assert ended_run.left_in_shared_memory(0) == [], "another process made it"
    ended_run.mapped |= mapped_files(os.getpid())
    assert set(ended_run.left_in_shared_memory(0)) & set(map(str, made))
    del semaphore


def test_a_file_is_found_by_the_number_in_its_name(ended_run: RunProcess) -> None:
    left = Path(f"/dev/shm/asyncrl-test-{ended_run.process.pid}.weights")
    left.write_bytes(b"\0")
    try:
        assert ended_run.left_in_shared_memory(0) == [str(left)]
    finally:
        left.unlink()
    assert ended_run.left_in_shared_memory(0) == []
