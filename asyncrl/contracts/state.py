"""The coordinator's part of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "State",
]


@dataclass(frozen=True, slots=True)
class State:
    """Control's part of a checkpoint. `version` is the policy version, which counts applied
    steps."""

    run_id: str
    attempt: int
    version: int
    steps_attempted: int
    frontier: int
    """Lowest ordinal without an outcome."""
    finished_above: tuple[int, ...]
    """Ordinals above the frontier that have one."""
    seed: int = 0
    """Of data order and sampling: with the ordinals, the whole random state of control. The ranks'
    own is in learner/rank_N.pt."""
    waiting: tuple[tuple[int, int], ...] = ()
    """(attempt that made it, ordinal) of each scored group in buffer.parquet, row by row."""
    concurrency: float | None = None
    """Limit of groups that run at once, as far as it was found; None = there is none."""
    skipped_in_row: int = 0
    evaluations_due: tuple[int, ...] = ()
    """Versions whose evaluation was due and not yet done."""
    last_marked: int | None = None
    """Newest version that was looked at for whether its evaluation is due; None = the checkpoint's
    own."""
    config_hash: str = ""
    """Of config.yaml, the resolved config."""
    data_hash: str = ""
    """Of the training file: ordinals mean its rows."""
    model_hash: str = ""
    """Of the model's config and tokenizer."""
