"""Runs a test's function on ZeRO-3 ranks that are plain processes on gloo, without Ray.

The ranks are forked from a server that has imported torch, transformers and DeepSpeed once, so they
start quickly.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "deepspeed",
        "deepspeed.runtime.zero.stage3",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "ray",
        "pytest",
        "transformers.models.qwen3.modeling_qwen3",
    ]
)
TIMEOUT_S = 400.0
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",
    # Blocks of 64 KiB and more get their own mapping, which ends when they are freed, so resident
    # memory is memory in use.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_MMAP_MAX_": "1000000",
}


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(rank, world_size, *arguments)` in `world_size` new processes that have joined
    one process group. Returns their results by rank.

    The processes import `function` by name. The server starts at the first call, with the
    environment that is set here.

    Raises:
        AssertionError: a rank failed or took too long. The message has its traceback, or the stacks
            of all ranks that did not answer.
    """
    from asyncrl.learning.engine.zero import listening_socket

    listener = listening_socket("127.0.0.1")
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    stacks = tempfile.TemporaryDirectory()
    processes, pipes = [], []
    try:
        for rank in range(world_size):
            receiver, sender = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(
                target=_rank,
                args=(sender, function, rank, world_size, listener, stacks.name, arguments),
                daemon=True,
            )
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        results: dict[int, Any] = {}
        while len(results) < world_size:
            waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
            ready = wait(waiting, TIMEOUT_S)
            late = {rank: processes[rank] for rank in range(world_size) if rank not in results}
            assert ready, (
                f"ranks {sorted(late)} did not answer within {TIMEOUT_S:g} s:\n"
                f"{_stacks(Path(stacks.name), late)}"
            )
            for pipe in ready:
                rank = pipes.index(pipe)
                failed, results[rank] = pipe.recv()
                assert not failed, f"rank {rank}:\n{results[rank]}"
        return [results[rank] for rank in range(world_size)]
    finally:
        os.environ.clear()
        os.environ.update(before)
        listener.close()
        for process in processes:
            process.kill()
            process.join()
        stacks.cleanup()


def _stacks(directory: Path, processes: Mapping[int, Any]) -> str:
    """What the threads of each rank are doing. A rank that has not started has no stacks."""
    for process in processes.values():
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(2.0)
    return "\n".join(
        f"rank {rank} ({'alive' if process.is_alive() else f'ended: {process.exitcode}'}):\n"
        + (path.read_text() if (path := directory / str(rank)).exists() else "not started")
        for rank, process in processes.items()
    )


def _rank(
    sender: Any,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    listener: socket.socket,
    stacks: str,
    arguments: tuple[Any, ...],
) -> None:
    file = (Path(stacks) / str(rank)).open("w")
    faulthandler.register(signal.SIGUSR1, file)
    import torch

    from asyncrl.learning.engine import zero

    try:
        torch.set_num_threads(1)
        address, port = listener.getsockname()
        zero.join_process_group(
            rank, world_size, address, port, "gloo", listener if rank == 0 else None
        )
        sender.send((False, function(rank, world_size, *arguments)))
    except BaseException:
        sender.send((True, traceback.format_exc()))
    # Another rank may still need this rank's store, so wait until the test ends all ranks.
    signal.pause()
