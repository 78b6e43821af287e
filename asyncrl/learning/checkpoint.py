"""The learner on disk: DeepSpeed's state to go on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from asyncrl.runtime.files import replace_text

__all__ = ["load_rank", "save_rank"]

TAG = "zero3"
COUNTERS = "counters.json"
"""The learner's own counts: world_size, applied (steps), trained_tokens (loss tokens)."""


def save_rank(engine: Any, directory: Path, rank: int, counters: dict[str, int], norms: list[float]) -> None:
    """Write this rank's shards, RNG state and the last gradient norms under `directory` (a collective); rank 0 writes counters.json as well."""
    engine.save_checkpoint(str(directory), tag=TAG, save_latest=False)
    torch.save({"rng": torch.get_rng_state(), "norms": norms}, _rank_file(directory, rank))
    if rank == 0:
        replace_text(Path(directory) / COUNTERS, json.dumps(counters))


def load_rank(engine: Any, directory: Path, rank: int, world_size: int) -> tuple[dict[str, int], list[float]]:
    """Restore what `save_rank` wrote (a collective); return counters and norms. The optimizer's state is restored, its settings (weight decay, betas,
    epsilon) stay this run's. The shards are pickles: load only what this project wrote.

    Raises:
        ValueError: the directory cannot be read, or was written by another number of ranks.
    """
    try:
        counters: dict[str, int] = json.loads((Path(directory) / COUNTERS).read_text())
        if counters["world_size"] != world_size:
            raise ValueError(
                f"learner state {str(directory)!r} was written by {counters['world_size']} ranks, whose shards it holds; set learner.world_size to that, "
                f"not {world_size}"
            )
        own = torch.load(_rank_file(directory, rank), weights_only=True)
    except FileNotFoundError as error:
        raise ValueError(f"learner state {str(directory)!r} has no {Path(error.filename).name}; name a complete checkpoint") from None
    settings = [{name: value for name, value in group.items() if name != "params"} for group in engine.optimizer.param_groups]
    loaded, _ = engine.load_checkpoint(str(directory), tag=TAG, load_lr_scheduler_states=False)
    if loaded is None:
        raise ValueError(f"learner state {str(directory)!r} cannot be read; name a complete checkpoint")
    for group, ours in zip(engine.optimizer.param_groups, settings, strict=True):  # torch takes the groups of the file whole
        group.update(ours)
    torch.set_rng_state(own["rng"])
    return counters, own["norms"]


def _rank_file(directory: Path, rank: int) -> Path:
    return Path(directory) / f"rank_{rank}.pt"
