"""Stack traces of busy processes, and reports on those that cannot answer."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from asyncrl.runtime.processes.stacks import (
    innermost,
    register_stacks,
    stack_here,
    stack_of,
    stacks_as,
)
from asyncrl.runtime.ray.stream import stream_blocks


class Busy:
    """An actor that answers no call while it works."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def register(self) -> tuple[str, int]:
        return register_stacks(self.path)

    def work_for_long(self, flag: Path) -> None:
        flag.touch()
        time.sleep(600)


@pytest.fixture
def busy(ray_cluster, tmp_path):
    stacks = tmp_path / "stacks"
    stacks.mkdir()
    (stacks / "rank_0.txt").touch()
    os.utime(stacks / "rank_0.txt", (1, 1))  # an earlier process of that name made the file
    actor = ray_cluster.remote(Busy).options(num_cpus=0).remote(stacks / "rank_0.txt")
    node, process = ray_cluster.get(actor.register.remote())
    actor.work_for_long.remote(tmp_path / "works")
    deadline = time.monotonic() + 60
    while not (tmp_path / "works").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield node, process, stacks / "rank_0.txt"
    ray_cluster.kill(actor)


async def test_stacks_of_busy_stopped_and_dead_processes(busy):
    for _ in range(2):
        assert "in work_for_long" in await stack_of(*busy)
    process = psutil.Process(busy[1])
    process.suspend()
    try:
        assert "does not answer: it is stopped" in await stack_of(*busy)
    finally:
        process.resume()
    os.kill(process.pid, signal.SIGKILL)
    psutil.wait_procs([process], 30)
    assert await stack_of(*busy) == f"process {process.pid} is gone"


def test_a_process_that_has_not_registered_is_left_alone(tmp_path):
    """A new process may have the id of a registered one, and the signal would kill it."""
    innocent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        path = tmp_path / "stacks.txt"
        assert asyncio.run(stack_here(innocent.pid, path)) == f"process {innocent.pid} is gone"
        path.touch()
        os.utime(path, (1, 1))  # long before the process started
        assert asyncio.run(stack_here(innocent.pid, path)) == f"process {innocent.pid} is gone"
        innocent.communicate(b"\n")
        assert innocent.returncode == 0
    finally:
        innocent.kill()


async def test_the_stack_of_a_streams_task(ray_cluster, tmp_path):
    def tables():
        yield pa.table({"number": [1]})
        time.sleep(600)

    stream = stream_blocks(tables, lambda table: table, 1 << 20, "sleepy", tmp_path)
    try:
        assert next(stream)["number"].to_pylist() == [1]
        [line] = await stacks_as(tmp_path, "sleepy")
        assert re.match(r"sleepy \(process \d+\): .*in tables", line)
    finally:
        stream.close()


def test_the_main_thread_is_the_last_and_its_innermost_frames_come_first():
    other = 'Thread 0x1 (most recent call first):\n  File "a.py", line 1 in other\n\n'
    text = (
        other
        + 'Current thread 0x2 (most recent call first):\n  File "b.py", line 2 in inner\n  File'
        ' "c.py", line 3 in outer\n'
    )
    assert innermost(text) == 'File "b.py", line 2 in inner < File "c.py", line 3 in outer'
    assert innermost("") == "no Python frame"
