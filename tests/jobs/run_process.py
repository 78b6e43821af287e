"""A run in a process of its own, and all processes that it starts."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import psutil
from run_variables import HERE


def lives(process: psutil.Process) -> bool:
    """Whether a process runs. It may end during the call."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def command_line(process: psutil.Process) -> str:
    """The command line of a process in one line; "" if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def born(process: psutil.Process) -> float:
    """When a process started; 0 if it has ended."""
    try:
        return process.create_time()
    except psutil.NoSuchProcess:
        return 0.0


MAPPED = re.compile(r" (\d+) +/dev/shm/")
"""The inode of a mapped file in shared memory, in /proc/PID/maps. The path there may be older than
the file's name: a semaphore is mapped before it gets its own."""


def mapped_files(pid: int) -> set[int]:
    """Inodes of the files in shared memory that a process has mapped now; none if it has ended."""
    with contextlib.suppress(OSError):
        return set(map(int, MAPPED.findall(Path(f"/proc/{pid}/maps").read_text())))
    return set()


def named_for(path: Path, pids: Set[int]) -> bool:
    """Whether the name of a file contains the number of one of these processes."""
    return any(int(pid) in pids for pid in re.findall(r"-(\d+)\.", path.name))


class RunProcess:
    """`asyncrl train` in its own process group."""

    def __init__(
        self, config: Path, log: Path, arguments: list[str], environment: dict[str, str]
    ) -> None:
        self.log = log
        command = [Path(sys.executable).with_name("asyncrl"), "train", config, *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            cwd=HERE,  # where the rewards are
            env=environment,
            start_new_session=True,
        )
        self.seen: dict[int, psutil.Process] = {}
        self.mapped: set[int] = set()
        self.next_look = 0.0

    @property
    def output(self) -> str:
        return self.log.read_text()

    def descendants(self) -> list[psutil.Process]:
        """All living processes of this run, including those whose parent has ended."""
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.seen[child.pid] = child
        living = [child for child in self.seen.values() if lives(child)]
        if time.monotonic() > self.next_look:  # A look reads some thousand lines a process.
            pids = [self.process.pid, *(child.pid for child in living)]
            self.mapped.update(*map(mapped_files, pids))
            self.next_look = time.monotonic() + 3
        return living

    def having(self, part: str) -> list[psutil.Process]:
        """The living processes whose command line contains `part`, oldest first. An old one may
        still be ending."""
        found = [process for process in self.descendants() if part in command_line(process)]
        return sorted(found, key=born)

    def until(self, condition: Callable[[], Any], timeout_s: float = 400) -> Any:
        """Wait until the condition is true. Fail with the run's output if the run ends before."""
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            self.descendants()
            assert self.process.poll() is None, f"the run ended before:\n{self.output}"
            assert time.monotonic() < deadline, f"not within {timeout_s} s:\n{self.output}"
            time.sleep(0.2)
        return value

    def wait(self, timeout_s: float = 400) -> int:
        """Wait for the exit code, and record the run's processes until then."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self.descendants()
            assert time.monotonic() < deadline, f"not ended within {timeout_s} s:\n{self.output}"
            time.sleep(0.2)
        return self.process.returncode

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.descendants()
        self.process.send_signal(number)

    def gone(self, timeout_s: float = 15) -> list[str]:
        """Names of processes that are still alive after `timeout_s`."""
        _, alive = psutil.wait_procs(self.descendants(), timeout_s)
        return [
            f"{process.pid} {command_line(process)[:80]}" for process in alive if lives(process)
        ]

    def left_in_shared_memory(self, timeout_s: float = 30) -> list[str]:
        """Files in shared memory that this run's processes made and that are still there after
        `timeout_s`: a resource tracker may remove them a moment after their process has ended.
        Files of other programs, and of other tests that kill theirs, do not count."""
        deadline = time.monotonic() + timeout_s
        while (left := self._files()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return left

    def _files(self) -> list[str]:
        found = []
        for path in Path("/dev/shm").rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino in self.mapped or named_for(
                    path, self.seen.keys() | {self.process.pid}
                ):
                    found.append(str(path))
        return found

    def kill(self) -> None:
        for process in self.descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()
