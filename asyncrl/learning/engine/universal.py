"""Learner states for another number of ranks or another ZeRO stage, by DeepSpeed's universal
checkpoints (arXiv:2406.18820): one file for each parameter and each of AdamW's moments.

DeepSpeed 0.19.8 writes two forms of them, and reads only the one of its own stage: that of ZeRO-3,
and that of ZeRO-1 and ZeRO-2. `_adapt` makes one of the other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint import OPTIMIZER_STATE_DICT, PARAM, PARAM_GROUPS
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from asyncrl.learning.engine.whole import keeps_whole

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

CONVERTER = "deepspeed.checkpoint.ds_to_universal"
OF_SHARDS, OF_WHOLE = "zero_pp_rank_0_mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt"
"""The engine's own file of ZeRO-3, and of the other stages."""
STEP = "asyncrl_step"
"""Key of AdamW's step count, which ZeRO-3 keeps elsewhere than the other stages."""
SAVED_CLASSES = [ZeroStageEnum, LossScaler, fragment_address]
"""Classes of DeepSpeed in the files of ZeRO-1 and ZeRO-2, besides tensors, numbers and texts."""
LINES = 3
"""Last lines of the converter's errors in a message."""


def load_converted(
    engine: DeepSpeedEngine, source: Path, folder: Path, rank: int, was_sharded: bool
) -> None:
    """Load weights and optimizer states that another number of ranks or another stage wrote (a
    collective).

    Rank 0 converts the shards first. The shards are pickles: load only files that this project
    wrote.

    Args:
        source: folder of DeepSpeed's shards.
        folder: a folder for the converted states, which all ranks see. It is deleted afterwards.
        was_sharded: whether ZeRO-3 wrote the shards.

    Raises:
        ValueError: the shards cannot be converted.
    """
    another_form = was_sharded == keeps_whole(engine)
    failure: list[str | None] = [_convert(source, folder) if rank == 0 else None]
    if rank == 0 and failure[0] is None and another_form:
        _adapt(folder, was_sharded)
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise ValueError(f"learner state {str(source)!r} cannot be converted: {failure[0]}")
    engine._config.load_universal_checkpoint = True
    try:
        engine.load_checkpoint(str(folder.parent), tag=folder.name, load_lr_scheduler_states=False)
    finally:
        engine._config.load_universal_checkpoint = False
    common = _saved(folder / "zero" / "optimizer_state.pt") if another_form else {}
    # DeepSpeed gives all parameters one tensor as their step count, which each of them would raise.
    # It is on the CPU, where a fused AdamW on a GPU does not look for it.
    for parameter, state in engine.optimizer.optimizer.state.items():
        count = torch.as_tensor(common.get(STEP, state.get("step")), dtype=torch.float32)
        state["step"] = count.to(parameter.device, copy=True)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)


def _adapt(folder: Path, was_sharded: bool) -> None:
    """Turn converted states of ZeRO-3 into those of ZeRO-1 and ZeRO-2, or the reverse."""
    states = folder / "zero"
    common = _saved(states / "optimizer_state.pt")
    if was_sharded:
        (folder / OF_SHARDS).rename(folder / OF_WHOLE)
        for other in folder.glob("zero_pp_rank_*"):
            other.unlink()
        for path in states.glob("*/*.pt"):
            torch.save({PARAM: _saved(path)}, path)
        inner = common[OPTIMIZER_STATE_DICT]
        common = {
            "ds_version": deepspeed.__version__,
            PARAM_GROUPS: inner[PARAM_GROUPS],
            STEP: inner["state"][0]["step"],
        }
    else:
        (folder / OF_WHOLE).rename(folder / OF_SHARDS)
        steps = (_saved(path) for path in states.glob("*/step.pt"))
        common[OPTIMIZER_STATE_DICT] = {
            PARAM_GROUPS: common[PARAM_GROUPS],
            "state": {0: {"step": next(steps)}},
        }
    torch.save(common, states / "optimizer_state.pt")


def _saved(path: Path) -> Any:
    with torch.serialization.safe_globals(SAVED_CLASSES):
        return torch.load(path, map_location="cpu", weights_only=True)


def _convert(source: Path, folder: Path) -> str | None:
    """Why the conversion failed; None if it did not. In a process of its own, because the converter
    starts others. It makes patterns from the paths, so they are relative and have few special
    characters."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    near = os.path.relpath(source, folder.parent)
    # ZeRO-1 and ZeRO-2 write a description of the model only when asked, and need none here.
    options = [*workers, "--inject_missing_state"]
    folders = ["--input_folder", near, "--output_folder", folder.name]
    done = subprocess.run(
        [sys.executable, "-P", "-m", CONVERTER, *folders, *options],
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
