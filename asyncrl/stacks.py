"""What a process does just now: its threads' stacks, written when it is sent a signal, even while it is deep in C code."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

__all__ = ["register_stacks", "stack_of"]

SIGNAL = signal.SIGUSR2
FRAMES_SHOWN = 6
LOOK_EVERY_S, ANSWER_S = 0.05, 5.0


def register_stacks(path: Path) -> tuple[str, int]:
    """From now on this process appends its stacks to the file when it gets SIGUSR2. Returns the ids of its node and of itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.register(SIGNAL, path.open("w"), all_threads=True)  # the handler keeps the file
    return ray.get_runtime_context().get_node_id(), os.getpid()


async def stack_of(node: str, process: int, path: Path) -> str:
    """The newest frames of the process's main thread, the innermost first; or why there are none."""
    before = path.stat().st_size if path.exists() else 0
    try:
        await _signal(node, process)
    except (ProcessLookupError, ray.exceptions.RayError):
        return f"process {process} is gone"
    for _ in range(int(ANSWER_S / LOOK_EVERY_S)):
        await asyncio.sleep(LOOK_EVERY_S)
        if path.exists() and path.stat().st_size > before:
            return innermost(path.read_text(errors="replace")[before:])
    return f"process {process} does not answer: it is stopped, or on another machine that does not share {path.parent}"


def innermost(text: str) -> str:
    """Of a text by faulthandler, the first frames of the last thread, which is the main one."""
    thread = text.rstrip().split("\n\n")[-1]
    frames = [" ".join(line.split()) for line in thread.splitlines() if line.lstrip().startswith("File ")]
    return " < ".join(frames[:FRAMES_SHOWN]) or "no Python frame"


async def _signal(node: str, process: int) -> None:
    if node == ray.get_runtime_context().get_node_id():
        os.kill(process, SIGNAL)
    else:
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        sent: Any = ray.remote(os.kill).options(num_cpus=0, scheduling_strategy=strategy).remote(process, SIGNAL)
        await sent
