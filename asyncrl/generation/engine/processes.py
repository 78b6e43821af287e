"""The processes of an engine on this node."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import psutil

from asyncrl.runtime.files.temporary import ProcessTemporaryFolder
from asyncrl.runtime.processes.stacks import stack_here
from asyncrl.weights.staging import sweep

END_S = 10.0
"""Seconds that vLLM and its processes get to end before the processes are killed."""


class EngineProcesses:
    """The processes of an engine, and the folder of its temporary files and sockets. Create it
    before the engine: this process's children of that moment are not the engine's. The processes
    write their stacks to the folder on request."""

    def __init__(self) -> None:
        self._before = {child.pid for child in psutil.Process().children(recursive=True)}
        self._folder = ProcessTemporaryFolder("engine")
        self._started: Sequence[psutil.Process] = ()

    @property
    def folder(self) -> Path:
        return self._folder.path

    def started(self) -> None:
        """Note that the engine has started all its processes."""
        self._started = self._children()

    def alive(self) -> list[int]:
        """Ids of the processes that run."""
        return [process.pid for process in self._started if process.is_running()]

    async def stacks(self) -> list[str]:
        """The innermost frames of the main thread of each process."""
        pids = [process.pid for process in self._started]
        return list(
            await asyncio.gather(*(stack_here(pid, self.folder / f"{pid}.txt") for pid in pids))
        )

    def kill(self) -> None:
        """Kill the processes, also while the engine starts."""
        _kill(self._started or self._children())

    async def end(self) -> None:
        """Wait until the processes have ended, and kill those that do not. Removes what they
        leave."""
        _, alive = await asyncio.to_thread(psutil.wait_procs, self._started, END_S)
        _kill(alive)
        await asyncio.to_thread(sweep)  # killed workers leave their queues
        self._started = ()
        self._folder.close()

    def _children(self) -> list[psutil.Process]:
        return [
            child
            for child in psutil.Process().children(recursive=True)
            if child.pid not in self._before and not _is_resource_tracker(child)
        ]


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _is_resource_tracker(process: psutil.Process) -> bool:
    """Whether this is Python's resource tracker, which ends with this process and not with the
    engine."""
    return any("resource_tracker" in argument for argument in process.cmdline())
