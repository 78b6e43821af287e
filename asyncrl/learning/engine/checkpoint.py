"""Saves and loads the state of a rank: DeepSpeed's shards, counters and RNG state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from asyncrl.learning.engine.universal import load_converted
from asyncrl.runtime.files.shared import Written, size_and_checksum, write_summed

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from deepspeed.runtime.config import DeepSpeedConfig

TAG = "zero3"
"""Folder of DeepSpeed's files, of every ZeRO stage: checkpoints of 0.1.0 have this name."""
COUNTERS = "counters.json"
"""File of the learner's counters: world_size, zero_stage, applied (steps), trained_tokens (loss
tokens). A file without zero_stage is of ZeRO-3."""
SCRIPTS = "zero_to_*.py"
"""Scripts that DeepSpeed adds to each checkpoint."""


class _SummingWriter(TorchCheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's checkpoint writer with checksums. It writes torch's zip format, which needs no
    extra copy when it is written to a Python file; the older format does."""

    def __init__(self, config: DeepSpeedConfig, files: dict[Path, Written]) -> None:
        super().__init__(config)
        self.files = files

    def save(self, state_dict: Mapping[str, object], path: str) -> None:
        self.files[Path(path)] = write_summed(Path(path), partial(torch.save, state_dict))


def save_rank(
    engine: DeepSpeedEngine,
    directory: Path,
    rank: int,
    counters: dict[str, int],
    norms: list[float],
    trained_only: bool = False,
) -> dict[str, Written]:
    """Write this rank's shards, RNG state and last gradient norms under `directory` (a collective).
    Rank 0 also writes counters.json.

    Args:
        trained_only: leave out frozen parameters, which are those of the checkpoint that the run
            began from.

    Returns:
        Name relative to `directory` → size and checksum of each file that this rank wrote. All of
        them have been synced to disk.
    """
    files: dict[Path, Written] = {}
    engine.checkpoint_engine = _SummingWriter(engine._config, files)
    engine.save_checkpoint(
        str(directory), tag=TAG, save_latest=False, exclude_frozen_parameters=trained_only
    )
    own = _rank_file(directory, rank)
    files[own] = write_summed(
        own, partial(torch.save, {"rng": torch.get_rng_state(), "norms": norms})
    )
    if rank == 0:
        text = json.dumps(counters).encode()
        files[directory / COUNTERS] = write_summed(
            directory / COUNTERS, lambda file: file.write(text)
        )
        files |= {script: size_and_checksum(script) for script in directory.glob(SCRIPTS)}
    return {str(path.relative_to(directory)): written for path, written in files.items()}


def load_rank(
    engine: DeepSpeedEngine,
    directory: Path,
    rank: int,
    world_size: int,
    zero_stage: int,
    folder: Path,
    trained_only: bool = False,
) -> tuple[dict[str, int], list[float]]:
    """Restore the files of `save_rank` (a collective). Returns counters and gradient norms.

    The optimizer's state is restored. Its settings (weight decay, betas, epsilon, clipping) stay
    those of this run. If another number of ranks wrote the files, each rank's random state begins
    anew. The shards are pickles: load only files that this project wrote.

    Args:
        folder: a folder that all ranks see, for shards that must be converted.

    Raises:
        ValueError: the directory cannot be read, or its shards cannot be converted to this number
            of ranks and this stage.
    """
    try:
        counters: dict[str, int] = json.loads((Path(directory) / COUNTERS).read_text())
        same_ranks = counters["world_size"] == world_size
        own = torch.load(_rank_file(directory, rank if same_ranks else 0), weights_only=True)
    except FileNotFoundError as error:
        raise ValueError(
            f"learner state {str(directory)!r} has no {Path(error.filename).name}; name a complete"
            " checkpoint"
        ) from None
    optimizer = engine.optimizer
    clipping = optimizer.clip_grad
    settings = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    was_sharded = counters.get("zero_stage", 3) == 3
    if same_ranks and was_sharded == (zero_stage == 3):
        loaded, _ = engine.load_checkpoint(
            str(directory),
            tag=TAG,
            load_module_strict=not trained_only,
            load_lr_scheduler_states=False,
        )
        if loaded is None:
            raise ValueError(
                f"learner state {str(directory)!r} cannot be read; name a complete checkpoint"
            )
    else:
        load_converted(engine, directory / TAG, folder, rank, was_sharded)
    if same_ranks:
        torch.set_rng_state(own["rng"])
    # torch replaces the settings of the groups by those in the file, and ZeRO-1 and ZeRO-2 clip as
    # the file says.
    for group, ours in zip(optimizer.param_groups, settings, strict=True):
        group.update(ours)
    optimizer.clip_grad = clipping
    return counters, own["norms"]


def _rank_file(directory: Path, rank: int) -> Path:
    return Path(directory) / f"rank_{rank}.pt"
