"""The coordinator's state in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class State:
    """The coordinator's state in a checkpoint. `version` is the policy version: the number of
    applied steps."""

    run_id: str
    attempt: int
    version: int
    steps_attempted: int
    frontier: int
    """The lowest ordinal without an outcome."""
    finished_above: tuple[int, ...]
    """Ordinals above the frontier that have an outcome."""
    seed: int = 0
    """Seed of data order and sampling. With the ordinals it is control's whole random state; that
    of each rank is in learner/rank_N.pt."""
    waiting: tuple[tuple[int, int], ...] = ()
    """(attempt that generated it, ordinal) of each scored group in buffer.parquet, row by row."""
    concurrency: float | None = None
    """Adaptive limit of concurrent groups; None = no limit."""
    skipped_in_row: int = 0
    evaluations_due: tuple[int, ...] = ()
    """Versions whose evaluation is still due."""
    last_marked: int | None = None
    """The newest version for which control decided whether an evaluation is due; None =
    `version`."""
    config_hash: str = ""
    """Hash of config.yaml, the resolved config."""
    data_hash: str = ""
    """Hash of the training files, whose rows the ordinals identify."""
    model_hash: str = ""
    """Hash of the model's config and tokenizer."""
    frozen_hashes: Mapping[str, str] = field(default_factory=dict)
    """Setting that names a frozen model → hash of its weights."""
