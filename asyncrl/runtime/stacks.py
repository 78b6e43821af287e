"""What a process does just now: its threads' stacks, written when it is sent a signal, even while
it is deep in C code.

Ray is imported by what asks another node, and not by an engine, which knows nothing of it.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from pathlib import Path
from typing import Any

import psutil

from asyncrl.runtime.files import append_to

__all__ = ["register_stacks", "register_stacks_as", "stack_here", "stack_of", "stacks_as"]

SIGNAL = signal.SIGUSR2
FRAMES_SHOWN = 6
GONE = "is gone"
LOOK_EVERY_S, ANSWER_S = 0.05, 3.0
CLOCK_S = 1.0
"""Seconds by which a file's time and a process's may differ."""


def register_stacks(path: Path) -> tuple[str, int]:
    """From now on this process appends its stacks to the file when it gets SIGUSR2. Returns the ids
    of its node and its process."""
    import ray

    faulthandler.register(SIGNAL, append_to(path), all_threads=True)  # the handler keeps the file
    return ray.get_runtime_context().get_node_id(), os.getpid()


def register_stacks_as(folder: Path, name: str) -> None:
    """The same, in a file that says itself who writes it: for processes that nobody has a handle
    of. Call it in a Ray task or actor."""
    import ray

    register_stacks(folder / f"{name}.{ray.get_runtime_context().get_node_id()}.{os.getpid()}.txt")


async def stacks_as(folder: Path, name: str) -> list[str]:
    """What each process that has registered under the name does, but for those that are gone."""
    files = sorted(folder.glob(f"{name}.*.txt"))
    stacks = await asyncio.gather(
        *(stack_of(path.name.split(".")[-3], int(path.name.split(".")[-2]), path) for path in files)
    )
    return [
        f"{name} (process {path.name.split('.')[-2]}): {stack}"
        for path, stack in zip(files, stacks, strict=True)
        if not stack.endswith(GONE)
    ]


async def stack_of(node: str, process: int, path: Path) -> str:
    """The newest frames of the process's main thread, the innermost first; or why there are
    none."""
    from ray.exceptions import RayError

    before = path.stat().st_size if path.exists() else 0
    try:
        await _signal(node, process, path)
    except (ProcessLookupError, RayError):
        return f"process {process} {GONE}"
    return await _written(process, path, before)


async def stack_here(process: int, path: Path) -> str:
    """`stack_of` a process on this node; needs no Ray."""
    before = path.stat().st_size if path.exists() else 0
    try:
        send_signal(process, path)
    except ProcessLookupError:
        return f"process {process} {GONE}"
    return await _written(process, path, before)


async def _written(process: int, path: Path, before: int) -> str:
    for _ in range(int(ANSWER_S / LOOK_EVERY_S)):
        await asyncio.sleep(LOOK_EVERY_S)
        if path.exists() and path.stat().st_size > before:
            return innermost(path.read_text(errors="replace")[before:])
    return (
        f"process {process} does not answer: it is stopped, or on another machine that does not"
        f" share {path.parent}"
    )


def innermost(text: str) -> str:
    """Of a text by faulthandler, the first frames of the last thread, which is the main one."""
    thread = text.rstrip().split("\n\n")[-1]
    frames = [
        " ".join(line.split()) for line in thread.splitlines() if line.lstrip().startswith("File ")
    ]
    return " < ".join(frames[:FRAMES_SHOWN]) or "no Python frame"


async def _signal(node: str, process: int, path: Path) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if node == ray.get_runtime_context().get_node_id():
        send_signal(process, path)
    else:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        sent: Any = (
            ray.remote(send_signal)
            .options(num_cpus=0, scheduling_strategy=strategy)
            .remote(process, path)
        )
        await sent


def send_signal(process: int, path: Path) -> None:
    """Raises ProcessLookupError also when another process has the number by now: one that has not
    registered would die of the signal."""
    try:
        registered = (
            path.exists() and path.stat().st_mtime > psutil.Process(process).create_time() - CLOCK_S
        )
    except psutil.NoSuchProcess:
        registered = False
    if not registered:
        raise ProcessLookupError(process)
    os.kill(process, SIGNAL)
