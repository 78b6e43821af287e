"""Healthy ranges of metrics, and one line for each that is left. docs/metrics.md says more about
each."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["FIRST_STEPS", "RANGES", "Alarms", "Range", "alarms"]

FIRST_STEPS = 8
"""Steps at the run's beginning whose highest entropy is what `entropy_ratio` compares with: a run
may collapse within them."""


@dataclass(frozen=True, slots=True)
class Range:
    """Healthy from `low` to `high`, both included; `advice` says what to do outside."""

    low: float
    high: float
    advice: str
    steps: int = 1
    """Steps in a row outside that make an alarm: more than one for a share of few groups, which is
    noisy."""


GIBBERISH = (
    "the completions look garbled: read some (asyncrl.open_run(...).trajectories()); are"
    " model.path, its tokenizer and chat template the right ones?"
)
LESS_STALE = "lower staleness.max_staleness or learner.learning_rate"
SMALLER_STEPS = "lower learner.learning_rate"
"""In place of LESS_STALE where the step's data is at most one version old: such data can hardly be
fresher, so one step moves the policy too far."""
COLLAPSED = (
    "the entropy has collapsed, so a group's completions hardly differ; unless the task is solved,"
    " go on from an earlier checkpoint (checkpoint.ckpt_step) with a lower learner.learning_rate,"
    " or a higher algorithm.eps_clip_high or entropy_coef"
)
"""Cui et al. 2025 (arXiv 2505.22617): once 94% of the entropy is used up, so is 93% of what the
reward gains."""

RANGES = {
    "ess": Range(0.5, 1.0, LESS_STALE),
    "chi2": Range(-math.inf, 1.0, LESS_STALE),
    "ratio_mean": Range(0.8, 1.25, LESS_STALE),
    "kl_k3": Range(0.0, 0.1, LESS_STALE),
    "clip_fraction": Range(0.0, 0.3, LESS_STALE),
    "mask_fraction": Range(
        0.0, 0.3, f"what a correction masks is wasted: {LESS_STALE}, or widen the correction"
    ),
    "nonfinite_loss": Range(
        0,
        0,
        "the step was skipped; lower learner.learning_rate, or look at its batch in kept/*.parquet"
        " (learner.find_nonfinite)",
    ),
    "nonfinite_gradient": Range(
        0,
        0,
        "the step was skipped; lower learner.learning_rate, or look at its batch in kept/*.parquet",
    ),
    "entropy_ratio": Range(0.05, math.inf, COLLAPSED, steps=3),
    "grad_norm_ratio": Range(
        0.0,
        10.0,
        "the gradient leapt; the kept_batch event says where its batch is"
        " (learner.grad_norm_spike)",
    ),
    "control/failed_groups": Range(
        0, 0, "groups were not generated in time; outcomes/*.parquet has the reasons"
    ),
    "rollout/truncated_ratio": Range(
        0.0,
        0.3,
        "raise rollout.max_completion_length (or data.max_length), or check the stop tokens that"
        " `asyncrl plan` shows",
    ),
    "rollout/bad_logprob_ratio": Range(
        0.0, 0.0, "the generator gave NaN or Inf log-probs; those trajectories are masked"
    ),
    "rollout/logprob_mean": Range(-4.0, 0.0, GIBBERISH),
    "rollout/loop_ratio": Range(0.0, 0.1, f"{GIBBERISH} rollout.repetition_stop ends loops"),
    "rollout/unprintable_ratio": Range(0.0, 0.01, GIBBERISH),
    "reward/unscored_ratio": Range(
        0.0,
        0.1,
        "a reward gives too many completions none (its judge fails?): reward/NAME/unscored_ratio"
        " says which",
    ),
    "reward/zero_variance_ratio": Range(
        0.0,
        0.9,
        "hardly any group teaches anything: use harder or easier prompts, or"
        " algorithm.filter_zero_variance",
        steps=3,
    ),
    "eval/failed_ratio": Range(
        0.0,
        0.0,
        "completions were late or failed and count as wrong; evaluations/*.parquet has each one's"
        " status and reason",
    ),
    "time/event_loop_lag_s": Range(0.0, 2.0, "the driver has too little CPU"),
}
"""Metric of a step or an evaluation → its healthy range."""

OF_RATIO = {"ess", "chi2", "ratio_mean", "kl_k3"}
"""Those of the learner's probability over the generator's, which are of two distributions where
rollouts sample from some tokens alone."""


def alarms(metrics: Mapping[str, Any], cut: bool = False) -> list[str]:
    """One line for each metric outside its range; metrics that are missing, NaN or not numbers are
    passed over.

    Args:
        cut: rollouts sample from some tokens alone (top_p, top_k, min_p), so OF_RATIO says nothing
            of staleness.
    """
    lines = []
    for name, healthy in RANGES.items():
        if cut and name in OF_RATIO:
            continue
        value = metrics.get(name)
        if (
            isinstance(value, int | float)
            and not math.isnan(value)
            and not healthy.low <= value <= healthy.high
        ):
            advice = (
                healthy.advice.replace(LESS_STALE, SMALLER_STEPS)
                if metrics.get("staleness/max", math.inf) <= 1
                else healthy.advice
            )
            if (
                name == "reward/zero_variance_ratio"
                and metrics.get("entropy_ratio", 1.0) < RANGES["entropy_ratio"].low
            ):
                advice = COLLAPSED
            lines.append(f"{name} = {value:.3g} is {_outside(healthy)}: {advice}")
    return lines


class Alarms:
    """The alarms of one run, step by step."""

    def __init__(self, cut: bool = False, entropies: Iterable[float] = ()) -> None:
        """
        Args:
            cut: as in `alarms`.
            entropies: those of the run's first steps, when it goes on from a checkpoint.
        """
        self._cut = cut
        self._first = list(entropies)[:FIRST_STEPS]
        self._outside: Counter[str] = Counter()
        """Steps in a row that each metric has been outside its range."""

    def entropy_ratio(self, entropy: Any) -> dict[str, float]:
        """The metric of that name, of a step's `entropy` in nats: over the highest of the run's
        first FIRST_STEPS steps. Empty where there is no entropy."""
        if not isinstance(entropy, int | float) or math.isnan(entropy):
            return {}
        if len(self._first) < FIRST_STEPS:
            self._first.append(entropy)
        highest = max(self._first)
        return {"entropy_ratio": entropy / highest} if highest > 0 else {}

    def check(self, metrics: Mapping[str, Any]) -> dict[str, tuple[str, bool]]:
        """Of each metric that has been outside its range for long enough: its line, and whether it
        is so for the first time since it was inside."""
        lines = {line.split(" ")[0]: line for line in alarms(metrics, self._cut)}
        for name in RANGES.keys() & metrics.keys():
            self._outside[name] = self._outside[name] + 1 if name in lines else 0
        return {
            name: (line, self._outside[name] == RANGES[name].steps)
            for name, line in lines.items()
            if self._outside[name] >= RANGES[name].steps
        }


def _outside(healthy: Range) -> str:
    if healthy.low == -math.inf:
        return f"above {healthy.high:g}"
    if healthy.high == math.inf:
        return f"below {healthy.low:g}"
    return (
        f"outside {healthy.low:g} to {healthy.high:g}"
        if healthy.high != healthy.low
        else f"outside {healthy.low:g}"
    )
