"""The learner on disk: DeepSpeed's state to go on from."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from asyncrl.runtime.shared import Written, size_and_checksum, write_summed

__all__ = ["load_rank", "save_rank"]

TAG = "zero3"
COUNTERS = "counters.json"
"""The learner's own counts: world_size, applied (steps), trained_tokens (loss tokens)."""
SCRIPTS = "zero_to_*.py"
"""DeepSpeed puts them beside each checkpoint."""


class _SummingWriter(TorchCheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's writer, which also makes the checksums. torch's zip format goes through a Python
    file without a copy; the older one does not."""

    def __init__(self, config: Any, files: dict[Path, Written]) -> None:
        super().__init__(config)
        self.files = files

    def save(self, state_dict: Any, path: str) -> None:
        self.files[Path(path)] = write_summed(Path(path), partial(torch.save, state_dict))


def save_rank(
    engine: Any, directory: Path, rank: int, counters: dict[str, int], norms: list[float]
) -> dict[str, Written]:
    """Write this rank's shards, RNG state and the last gradient norms under `directory` (a
    collective); rank 0 writes counters.json as well.

    Returns:
        Name relative to `directory` → size and checksum, of each file that this rank wrote. All of
        them are on the disk.
    """
    files: dict[Path, Written] = {}
    engine.checkpoint_engine = _SummingWriter(engine._config, files)
    engine.save_checkpoint(str(directory), tag=TAG, save_latest=False)
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
    engine: Any, directory: Path, rank: int, world_size: int
) -> tuple[dict[str, int], list[float]]:
    """Restore what `save_rank` wrote (a collective); return counters and norms. The optimizer's
    state is restored, its settings (weight decay, betas, epsilon) stay this run's. The shards are
    pickles: load only what this project wrote.

    Raises:
        ValueError: the directory cannot be read, or was written by another number of ranks.
    """
    try:
        counters: dict[str, int] = json.loads((Path(directory) / COUNTERS).read_text())
        if counters["world_size"] != world_size:
            raise ValueError(
                f"learner state {str(directory)!r} was written by {counters['world_size']} ranks,"
                f" whose shards it holds; set learner.world_size to that, not {world_size}"
            )
        own = torch.load(_rank_file(directory, rank), weights_only=True)
    except FileNotFoundError as error:
        raise ValueError(
            f"learner state {str(directory)!r} has no {Path(error.filename).name}; name a complete"
            " checkpoint"
        ) from None
    settings = [
        {name: value for name, value in group.items() if name != "params"}
        for group in engine.optimizer.param_groups
    ]
    loaded, _ = engine.load_checkpoint(str(directory), tag=TAG, load_lr_scheduler_states=False)
    if loaded is None:
        raise ValueError(
            f"learner state {str(directory)!r} cannot be read; name a complete checkpoint"
        )
    for group, ours in zip(
        engine.optimizer.param_groups, settings, strict=True
    ):  # torch takes the groups of the file whole
        group.update(ours)
    torch.set_rng_state(own["rng"])
    return counters, own["norms"]


def _rank_file(directory: Path, rank: int) -> Path:
    return Path(directory) / f"rank_{rank}.pt"
