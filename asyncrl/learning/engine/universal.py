"""Learner states for another number of ranks, by DeepSpeed's universal checkpoints
(arXiv:2406.18820): one file for each parameter and each of AdamW's moments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

CONVERTER = "deepspeed.checkpoint.ds_to_universal"
LINES = 3
"""Last lines of the converter's errors in a message."""


def load_converted(engine: DeepSpeedEngine, source: Path, folder: Path, rank: int) -> None:
    """Load weights and optimizer states that another number of ranks wrote (a collective).

    Rank 0 converts the shards first. The shards are pickles: load only files that this project
    wrote.

    Args:
        source: folder of DeepSpeed's shards.
        folder: a folder for the converted states, which all ranks see. It is deleted afterwards.

    Raises:
        ValueError: the shards cannot be converted.
    """
    failure: list[str | None] = [_convert(source, folder) if rank == 0 else None]
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise ValueError(f"learner state {str(source)!r} cannot be converted: {failure[0]}")
    engine._config.load_universal_checkpoint = True
    try:
        engine.load_checkpoint(str(folder.parent), tag=folder.name, load_lr_scheduler_states=False)
    finally:
        engine._config.load_universal_checkpoint = False
    # DeepSpeed gives all parameters one tensor as their step count, which each of them would raise.
    # It is on the CPU, where a fused AdamW on a GPU does not look for it.
    for parameter, state in engine.optimizer.optimizer.state.items():
        state["step"] = state["step"].to(parameter.device, copy=True)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)


def _convert(source: Path, folder: Path) -> str | None:
    """Why the conversion failed; None if it did not. In a process of its own, because the converter
    starts others. It makes patterns from the paths, so they are relative and have few special
    characters."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    near = os.path.relpath(source, folder.parent)
    folders = ["--input_folder", near, "--output_folder", folder.name]
    done = subprocess.run(
        [sys.executable, "-P", "-m", CONVERTER, *folders, *workers],
        cwd=folder.parent,
        capture_output=True,
        text=True,
    )
    # The converter names its output in a file beside it.
    folder.with_name("latest_universal").unlink(missing_ok=True)
    if done.returncode == 0:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    return " / ".join(done.stderr.strip().splitlines()[-LINES:]) or f"exit code {done.returncode}"
