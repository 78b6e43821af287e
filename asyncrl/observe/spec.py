"""What observation needs to know of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ObserveSpec:
    """`observe_spec` of `asyncrl.preflight.specs` makes it from the config."""

    max_steps: int
    max_staleness: int
    """Versions."""
    rewards: tuple[str, ...]
    """Names of the reward functions."""
    accuracy: str
    """The reward function that evaluations report."""
    is_accuracy: bool
    """Whether its mean is called accuracy, because `eval.accuracy` names it. Other rewards may have
    any scale."""
    evaluation_sets: tuple[str, ...]
    """Names of the evaluation sets, in the order of evaluation."""
    cuts_distribution: bool
    """Whether rollouts sample only from some tokens (top_p, top_k, min_p)."""
    completions_every: int
    """Steps between two tables of completions in the sinks; 0 = no tables."""
    trained_ends: tuple[str, ...] = ()
    """Ends of sessions that are trained (`environment.train_ends`)."""
