"""Healthy ranges of metrics, and an alarm line for each metric outside its range.

`metrics.yaml` explains each metric.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from asyncrl.contracts.rows import FAILED_ENDS
from asyncrl.observe.metric_values import number

FIRST_STEPS = 8
"""`entropy_ratio` compares with the highest entropy of this many first steps of the run. It is the
highest and not the mean, because a run may collapse within these steps."""


@dataclass(frozen=True, slots=True)
class Range:
    """A metric is healthy from `low` to `high`, both included. `advice` says what to do outside."""

    low: float
    high: float
    advice: str
    steps: int = 1
    """Consecutive steps outside the range that raise an alarm. Shares of few groups are noisy and
    need more than one."""


GIBBERISH = (
    "the completions look garbled: read some (asyncrl.open_run(...).trajectories()); are"
    " model.path, its tokenizer and chat template the right ones?"
)
LESS_STALE = "lower staleness.max_staleness or learner.learning_rate"
FRESHER = (
    "on_stale: mask leaves out much: the first tokens of long completions, and short completions"
    " whose group waits for a long one; raise staleness.max_staleness, or set staleness.on_stale:"
    " wait"
)
SMALLER_STEPS = "lower learner.learning_rate"
"""Replaces LESS_STALE when a step's data is at most one version old. Such data can hardly be
fresher, so the cause is a step that moves the policy too far."""
COLLAPSED = (
    "the entropy has collapsed, so a group's completions hardly differ; unless the task is solved,"
    " resume from an earlier checkpoint (checkpoint.ckpt_step) with a lower learner.learning_rate,"
    " or a higher algorithm.loss.eps_clip_high or entropy_coef"
)
"""Cui et al. 2025 (arXiv 2505.22617): a policy that has used up 94% of its entropy has made 93% of
its reward gain."""

RANGES = {
    "ess": Range(0.5, 1.0, LESS_STALE),
    "chi2": Range(-math.inf, 1.0, LESS_STALE),
    "ratio_mean": Range(0.8, 1.25, LESS_STALE),
    "kl_k3": Range(0.0, 0.1, LESS_STALE),
    "clip_fraction": Range(0.0, 0.3, LESS_STALE),
    "mask_fraction": Range(
        0.0, 0.3, f"masked tokens are wasted work: {LESS_STALE}, or widen the correction"
    ),
    "stale/masked_ratio": Range(0.0, 0.3, FRESHER, steps=3),
    "stale/empty_ratio": Range(0.0, 0.1, FRESHER, steps=3),
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
        "the gradient norm jumped; the kept_batch event says where its batch is"
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
    "rollout/no_teacher_ratio": Range(
        0.0,
        0.05,
        "the teacher failed at these trajectories, which are masked; the column teacher_failure of"
        " groups/*.parquet and the teacher's log say why",
    ),
    "session/env_error_ratio": Range(
        0.0,
        0.05,
        "the environment fails: the column session_note of groups/*.parquet says where",
    ),
    "session/agent_error_ratio": Range(
        0.0,
        0.05,
        "agent programs fail: the column session_note of groups/*.parquet says how",
    ),
    "session/reward_error_ratio": Range(
        0.0,
        0.05,
        "environments give no valid reward: the column session_note of groups/*.parquet says why",
    ),
    "session/deadline_ratio": Range(
        0.0,
        0.05,
        "sessions end late and are not trained: raise environment.deadline_s, or the limit that the"
        " column session_note of groups/*.parquet names",
    ),
    "session/unasked_ratio": Range(
        0.0,
        0.05,
        "the model takes no turn in these sessions, so they train nothing: the column session_note"
        " of groups/*.parquet says why; `asyncrl check-env` tries the environment",
    ),
    "session/unparsed_ratio": Range(
        0.0,
        0.2,
        "tool calls or reasoning cannot be parsed and stay text: read some (asyncrl samples RUN);"
        " `asyncrl check-env` says which format is read, and rollout.max_completion_length may cut"
        " them",
        steps=3,
    ),
    "session/prefix_hit_ratio": Range(
        0.9,
        1.0,
        "engines read again what earlier turns had read: their cache is too small"
        " (generator.kv_cache_memory_bytes, generator.gpu_memory_utilization), or turns go to other"
        " replicas",
        steps=3,
    ),
    "session/branch_ratio": Range(
        0.0,
        0.2,
        "turns do not continue the tokens before them, so rows repeat them: session/branches_… (not"
        " forked, repeated or separate ones) and the column turn_branch_reason of groups/*.parquet"
        " say why",
    ),
    "rollout/logprob_mean": Range(-4.0, 0.0, GIBBERISH),
    "rollout/loop_ratio": Range(0.0, 0.1, f"{GIBBERISH} rollout.repetition_stop ends loops"),
    "rollout/unprintable_ratio": Range(0.0, 0.01, GIBBERISH),
    "reward/unscored_ratio": Range(
        0.0,
        0.1,
        "a reward function returns None for too many completions (does its judge fail?):"
        " reward/NAME/unscored_ratio says which",
    ),
    "reward/unscored_refused_ratio": Range(
        0.0,
        0.0,
        "the server of a judge or a reward model refuses requests, and these completions are not"
        " trained: the log says why (too long for its context, or a content filter)",
    ),
    "reward/unscored_cut_ratio": Range(
        0.0,
        0.0,
        "judgments reach their token limit and give no score, so these completions are not trained:"
        " raise judge.max_tokens",
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

RATIO_METRICS = {"ess", "chi2", "ratio_mean", "kl_k3"}
"""Metrics of the ratio of learner to generator probability. With restricted sampling the two sides
have different distributions, and the ratio measures more than staleness."""


def alarms(
    metrics: Mapping[str, object],
    restricted: bool = False,
    trained_ends: Collection[str] = (),
) -> list[str]:
    """One line for each metric outside its range. Missing, NaN and non-numeric values are skipped.
    With a teacher, groups with equal rewards teach as well.

    Args:
        restricted: rollouts sample from a restricted set of tokens (top_p, top_k, min_p), so
            RATIO_METRICS are skipped.
        trained_ends: the run's `environment.train_ends`. Sessions with another of FAILED_ENDS are
            masked, so it is no fault of the reward that they have none.
    """
    masked = sum(
        number(metrics, f"session/{end}_ratio") or 0.0
        for end in FAILED_ENDS
        if end not in trained_ends
    )
    lines = []
    for name, healthy in RANGES.items():
        value = number(metrics, name)
        if (
            (restricted and name in RATIO_METRICS)
            or (name == "reward/zero_variance_ratio" and "distill/reverse_kl" in metrics)
            or value is None
            or (name == "reward/unscored_ratio" and value - masked <= healthy.high)
            or math.isnan(value)
            or healthy.low <= value <= healthy.high
        ):
            continue
        advice = _advice(name, healthy, metrics)
        lines.append(f"{name} = {value:.3g} is {_outside(healthy)}: {advice}")
    return lines


def _advice(name: str, healthy: Range, metrics: Mapping[str, object]) -> str:
    staleness = number(metrics, "staleness/max")
    entropy_ratio = number(metrics, "entropy_ratio")
    if (
        name == "reward/zero_variance_ratio"
        and entropy_ratio is not None
        and entropy_ratio < RANGES["entropy_ratio"].low
    ):
        return COLLAPSED
    if staleness is not None and staleness <= 1:
        return healthy.advice.replace(LESS_STALE, SMALLER_STEPS)
    return healthy.advice


class Alarms:
    """Raises the alarms of one run, step by step."""

    def __init__(
        self,
        restricted: bool = False,
        entropies: Iterable[float] = (),
        trained_ends: Collection[str] = (),
    ) -> None:
        """
        Args:
            restricted, trained_ends: as in `alarms`.
            entropies: of the run's first steps, if it resumes from a checkpoint.
        """
        self._restricted, self._trained_ends = restricted, trained_ends
        self._first_entropies = list(entropies)[:FIRST_STEPS]
        self._outside: Counter[str] = Counter()
        """Metric → consecutive steps that it has been outside its range."""

    def entropy_ratio(self, entropy: object) -> dict[str, float]:
        """The metric `entropy_ratio`: a step's `entropy` (nats) over the highest of the run's first
        FIRST_STEPS steps. Empty if the entropy is missing."""
        if not isinstance(entropy, int | float) or math.isnan(entropy):
            return {}
        if len(self._first_entropies) < FIRST_STEPS:
            self._first_entropies.append(entropy)
        highest = max(self._first_entropies)
        return {"entropy_ratio": entropy / highest} if highest > 0 else {}

    def check(self, metrics: Mapping[str, object]) -> dict[str, tuple[str, bool]]:
        """Metric → its alarm line, and whether the alarm is new.

        An alarm is new on the step on which the metric has been outside its range long enough.
        """
        found = alarms(metrics, self._restricted, self._trained_ends)
        lines = {line.split(" ")[0]: line for line in found}
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
