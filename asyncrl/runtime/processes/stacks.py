"""Stack traces of running processes. A signal makes a process write them, even from C code.

Ray is imported inside the functions that need it, because an engine's process runs without Ray.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from pathlib import Path

import psutil

from asyncrl.runtime.files.opening import append_to

SIGNAL = signal.SIGUSR2
FRAMES_SHOWN = 6
GONE = "is gone"
LOOK_EVERY_S, ANSWER_S = 0.05, 3.0
CLOCK_S = 1.0
"""Tolerance in seconds between the times of a file and a process."""


def register_stacks(path: Path) -> tuple[str, int]:
    """Let this process append its stacks to the file on SIGUSR2. Returns its node id and process
    id."""
    import ray

    faulthandler.register(SIGNAL, append_to(path), all_threads=True)  # the handler keeps the file
    path.touch()  # another process may have made it: its time shows that this one has registered
    return ray.get_runtime_context().get_node_id(), os.getpid()


def register_stacks_as(folder: Path, name: str) -> None:
    """`register_stacks` with the node and process ids in the file's name, for processes without a
    handle. Call it in a Ray task or actor."""
    import ray

    register_stacks(folder / f"{name}.{ray.get_runtime_context().get_node_id()}.{os.getpid()}.txt")


async def stacks_as(folder: Path, name: str) -> list[str]:
    """A line with the stack of each living process that registered under the name."""
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
    """The newest frames of the process's main thread, innermost first, or why there are none."""
    from ray.exceptions import RayError

    before = path.stat().st_size if path.exists() else 0
    try:
        await _signal(node, process, path)
    except (ProcessLookupError, RayError):
        return f"process {process} {GONE}"
    return await _written(process, path, before)


async def stack_here(process: int, path: Path) -> str:
    """`stack_of` for a process on this node, without Ray."""
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
    """The first frames of the last thread in faulthandler's output, which is the main thread."""
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
        sent: ray.ObjectRef[None] = (
            ray.remote(send_signal)
            .options(num_cpus=0, scheduling_strategy=strategy)
            .remote(process, path)
        )
        await sent


def send_signal(process: int, path: Path) -> None:
    """Send the signal, which would kill a process that has not registered.

    Raises:
        ProcessLookupError: the process is gone, or a new process has its id.
    """
    try:
        registered = (
            path.exists() and path.stat().st_mtime > psutil.Process(process).create_time() - CLOCK_S
        )
    except psutil.NoSuchProcess:
        registered = False
    if not registered:
        raise ProcessLookupError(process)
    os.kill(process, SIGNAL)
