"""A run in a process of its own, and all processes that it starts."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
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

    @property
    def output(self) -> str:
        return self.log.read_text()

    def descendants(self) -> list[psutil.Process]:
        """All living processes of this run, including those whose parent has ended."""
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.seen[child.pid] = child
        return [child for child in self.seen.values() if lives(child)]

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

    def kill(self) -> None:
        for process in self.descendants():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.kill()
        self.process.wait()
