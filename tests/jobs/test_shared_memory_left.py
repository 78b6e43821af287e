"""What the tests of whole runs count as left behind in shared memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path


def semaphores() -> set[str]:
    return set(map(str, Path("/dev/shm").glob("sem.mp-*")))


def test_only_files_that_no_process_has_mapped_are_left(
    shared_memory: Callable[[], set[str]],
) -> None:
    """A semaphore of a living process is not left behind, a file of an ended one is."""
    before = semaphores()
    semaphore = multiprocessing.get_context("forkserver").Semaphore(1)
    left = Path("/dev/shm/asyncrl-test-left")
    left.write_bytes(b"\0")
    try:
        assert (made := semaphores() - before)
        found = shared_memory()
        assert str(left) in found and not made & found
    finally:
        left.unlink()
        del semaphore
