"""What a run learns: rewards, held-out figures, lengths, and how far the policy moves."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from asyncrl.charts.drawing import (
    MOST_COLORS,
    SHARE,
    STEP,
    VERSION,
    Axis,
    Chart,
    curves,
    missing,
    small_curves,
    under_one_another,
)
from asyncrl.charts.series import band, names_of, points

NO_STEP = "No step is recorded yet."
NO_EVALUATION = (
    "No evaluation is recorded. eval.data names a held-out file, and eval.every_steps how often it"
    " is used."
)
ACCURACY = Axis("accuracy", ".0%", domain=(0, 1))
OFFLINE = "This run trains on a dataset and generates nothing."
SUMMARIES = ("/mean", "/std", "/min", "/p10", "/median", "/p90", "/max", "_ratio")
POLICY = {
    "entropy": Axis("nats per token"),
    "kl_k3": Axis("nats per token"),
    "clip_fraction": SHARE,
    "grad_norm": Axis("L2 norm"),
}
POLICY_TITLES = {
    "entropy": "Entropy of the policy",
    "kl_k3": "KL divergence of the learner from the generators' policy",
    "clip_fraction": "Share of clipped tokens",
    "grad_norm": "Norm of the gradient, before clipping",
}


def reward(metrics: pa.Table) -> Chart:
    """Mean reward of each step's batch, with a band of one standard deviation on both sides, cut at
    the batch's least and largest reward."""
    title = "Reward: mean of each batch, and one standard deviation"
    found = points(metrics, "step", "reward/mean")
    if not found:
        return missing(title, NO_STEP if _generates(metrics) else OFFLINE)
    wide, least, most = (
        dict(points(metrics, "step", f"reward/{of}")) for of in ("std", "min", "max")
    )
    spread = [
        (at, max(mean - wide[at], least[at]), min(mean + wide[at], most[at]))
        for at, mean in found
        if at in wide and at in least and at in most
    ]
    return curves(title, STEP, Axis("reward"), {"mean reward": found}, spread)


def reward_parts(metrics: pa.Table) -> Chart:
    """Mean of each reward function and of each of its parts."""
    title = "Rewards by function and part"
    names = names_of(metrics, "step", "reward/", without=SUMMARIES)
    if not names:
        return missing(title, NO_STEP if _generates(metrics) else OFFLINE)
    series = {name.removeprefix("reward/"): points(metrics, "step", name) for name in names}
    if len(series) > MOST_COLORS:
        return small_curves(title, STEP, Axis("mean"), series)
    return curves(title, STEP, Axis("mean reward"), series)


def accuracy(metrics: pa.Table) -> Chart:
    """Held-out accuracy of each set, and pass@k where it is measured."""
    title = "Held-out accuracy"
    names = [
        name
        for name in names_of(metrics, "evaluation", "eval/")
        if name.endswith("_accuracy") or "_pass_at_" in name or name == "eval/exact_match"
    ]
    if not names:
        return missing(title, NO_EVALUATION)
    series = {_plain(name): points(metrics, "evaluation", name) for name in names}
    return curves(title, VERSION, ACCURACY, series)


def compared(title: str, runs: Mapping[str, pa.Table], metric: str, event: str = "step") -> Chart:
    """One metric of several runs, by step; of the event `evaluation` by version.

    Args:
        runs: the run's name → `Run.metrics`.
        metric: such as `reward/mean`, or `eval/greedy_accuracy` with the event `evaluation`.
    """
    series = {name: points(metrics, event, metric) for name, metrics in runs.items()}
    if not any(series.values()):
        return missing(title, f"None of these runs records {metric}.")
    y = ACCURACY if metric.endswith("accuracy") else Axis(metric)
    return curves(title, VERSION if event == "evaluation" else STEP, y, series)


def lengths(metrics: pa.Table) -> Chart:
    """Tokens of a completion, with the band from the 10th to the 90th percentile, and the share of
    completions that reached their limit."""
    title = "Length of completions: mean, and the middle 80%"
    found = points(metrics, "step", "rollout/completion_tokens")
    if not found:
        return missing(title, NO_STEP if _generates(metrics) else OFFLINE)
    name = "rollout/completion_tokens"
    spread = band(metrics, "step", f"{name}_p10", f"{name}_p90")
    cut = points(metrics, "step", "rollout/truncated_ratio")
    return under_one_another(
        curves(title, STEP, Axis("tokens", ",d"), {"mean length": found}, spread),
        curves("Share of completions that were cut", STEP, SHARE, {"cut": cut}, height=80),
    )


def policy(metrics: pa.Table) -> Chart:
    """Entropy, KL divergence, clipped tokens and the gradient's norm, one below the other."""
    found = {name: points(metrics, "step", name) for name in POLICY}
    drawn = [
        curves(POLICY_TITLES[name], STEP, POLICY[name], {name: of}, height=110)
        for name, of in found.items()
        if of
    ]
    return under_one_another(*drawn) if drawn else missing("Policy", NO_STEP)


def losses(metrics: pa.Table) -> Chart:
    """Loss of each step and, for a run on a dataset, of the held-out rows."""
    title = "Loss"
    series = {
        "training": points(metrics, "step", "loss"),
        "held out": points(metrics, "evaluation", "eval/loss"),
    }
    if not any(series.values()):
        return missing(title, NO_STEP)
    return curves(title, STEP, Axis("loss"), series)


def preferences(metrics: pa.Table) -> Chart:
    """How well the policy tells chosen from rejected completions."""
    title = "Preferred side has the larger implicit reward"
    series = {
        "training": points(metrics, "step", "pref/accuracy"),
        "held out": points(metrics, "evaluation", "eval/pref/accuracy"),
    }
    if not any(series.values()):
        return missing(title, "This run does not train on pairs.")
    margins = {
        "chosen": points(metrics, "step", "pref/chosen_reward"),
        "rejected": points(metrics, "step", "pref/rejected_reward"),
    }
    return under_one_another(
        curves(title, STEP, Axis("share of pairs", ".0%", domain=(0, 1)), series),
        curves("Implicit rewards of both sides", STEP, Axis("reward"), margins),
    )


def _generates(metrics: pa.Table) -> bool:
    """Whether the run has generators, or has no steps yet."""
    return not points(metrics, "step", "loss") or bool(points(metrics, "step", "reward/mean"))


def _plain(name: str) -> str:
    """`eval/greedy_accuracy` as "greedy"."""
    bare = name.removeprefix("eval/").removesuffix("_accuracy")
    return bare.replace("_pass_at_", " pass@").replace("_", " ")
