"""One preference step: trains on pairs of completions, or on single completions with a label.

A pair is one packing unit, so its loss is computed in one micro-batch. A pair that is too long for
a micro-batch is computed in two passes (`long_pairs`), by the summed log-probs of its sides.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from asyncrl.algorithms.loss_metrics import LossSums, supervised_sums
from asyncrl.algorithms.preference import (
    Completions,
    Preferred,
    kto_baseline,
    kto_loss,
    pair_loss,
)
from asyncrl.algorithms.preference_losses import Kto, PairLoss
from asyncrl.algorithms.sequences import sequence_sum
from asyncrl.config import DpoConfig
from asyncrl.config.algorithm import OnlinePreferenceConfig
from asyncrl.contracts.offline_rows import OLDEST_VERSION_COLUMN, SIDES
from asyncrl.learning.engine.state import LearnerState
from asyncrl.learning.examples.offline_examples import Pair, pairs_of, unpaired_of
from asyncrl.learning.steps.blame import keep_if_bad, name_culprit
from asyncrl.learning.steps.components import CE, Component, ce_loss, weighted_sum, with_token_mean
from asyncrl.learning.steps.long_pairs import gradient_alone, sides_alone, split_pairs, values_of
from asyncrl.learning.steps.passes import Loss, train
from asyncrl.models.micro_batches import Example, MicroBatch

PreferenceObjective: TypeAlias = OnlinePreferenceConfig | DpoConfig

logger = logging.getLogger(__name__)


Sides = tuple[Completions, Completions]
"""The chosen and the rejected sides of some pairs."""

PAIR_METRICS = (
    "pref/loss",
    "pref/accuracy",
    "pref/margin",
    "pref/chosen_reward",
    "pref/rejected_reward",
    "pref/chosen_logprob",
    "pref/rejected_logprob",
)
WEIGHT_METRICS = ("pref/weight_mean", "pref/capped_fraction")
MARGIN_AT_STALENESS = "pref/margin_at_staleness_"


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a step trains."""

    examples: list[Example]
    preferences: Loss
    """The component `pref`."""
    ahead: Mapping[str, float] = field(default_factory=dict)
    """Shares of the step's metrics that were computed before training: those of long pairs."""
    added: Mapping[str, float] = field(default_factory=dict)
    """Further metrics."""
    means: Mapping[str, float] = field(default_factory=dict)
    """Metrics that are means over some of the pairs: name → all pairs / those pairs."""


def preference_step(
    state: LearnerState, table: pa.Table, objective: PreferenceObjective, temperature: float = 1.0
) -> dict[str, float]:
    """Take one step on a table of pairs, or of single completions for KTO (a collective). The
    learning rate is the scheduled one.

    The step is skipped on all ranks if any rank finds NaN or Inf. Its rows, and those of a step
    with a spike of the gradient norm, are kept. The log of this process has their path.

    Args:
        table: see `pairs_of` and `unpaired_of`.
        temperature: of the learner's log-probs.

    Raises:
        ValueError: there is no row, the rows cannot be used (as in `pairs_of`), or a side is longer
            than a micro-batch.
    """
    if not table.num_rows:
        raise ValueError("a preference step got no rows; give it at least one")
    moment = f"preference_{state.applied:06d}"
    metrics, note = train_preferences(state, table, objective, temperature, moment, [table])
    if note:
        logger.warning("preference step %d: %s", state.applied, note)
    return metrics


def train_preferences(
    state: LearnerState,
    table: pa.Table,
    objective: PreferenceObjective,
    temperature: float,
    moment: str,
    kept: Sequence[pa.Table],
) -> tuple[dict[str, float], str]:
    """Take the step of `preference_step` on a table with at least one row (a collective).

    Args:
        moment, kept: name and rows of the batch, which is kept after a bad step.

    Returns:
        Metrics, and what is unusual about the step: "" for an ordinary one.
    """
    step = _prepared(state, table, objective, temperature)
    examples, components = step.examples, [Component(1.0, step.preferences)]
    if objective.ce_coef:
        examples = with_token_mean(examples, CE, lambda example: bool(example.chosen))
        components.append(Component(objective.ce_coef, ce_loss))
    # The components have their own weights, so an example needs none.
    weights, loss = [1.0] * len(examples), weighted_sum(components)
    rate, names = state.scheduled(state.learning_rate), _metric_names(objective)
    metrics = train(state, examples, weights, loss, rate, 0.0, temperature, (*names, *step.means))
    metrics |= {name: metrics[name] + share for name, share in step.ahead.items()}
    metrics |= {name: metrics[name] * factor for name, factor in step.means.items()}
    metrics |= step.added
    if metrics["applied"]:
        state.trained_tokens += int(metrics["tokens"])
        metrics["grad_norm_ratio"] = state.norms.ratio(metrics["grad_norm"])
    find_culprit = partial(name_culprit, state, examples, weights, loss, temperature)
    return metrics, keep_if_bad(state, metrics, moment, kept, find_culprit)


def held_out_preferences(
    state: LearnerState, table: pa.Table, objective: PreferenceObjective, temperature: float = 1.0
) -> dict[str, float]:
    """The metrics of a preference step on these rows, without a step and without off-policy
    weights (a collective).

    Returns:
        Means per pair, under the names of a step's metrics, and `pairs`. For KTO, means per
        completion, and `completions`.

    Raises:
        ValueError: as in `preference_step`.
    """
    loss = objective.loss
    if isinstance(loss, Kto):
        return _held_out_unpaired(state, table, loss, temperature)
    pairs = pairs_of(table, loss.has_reference, behavior=False)
    if not pairs:
        raise ValueError("there are no held-out pairs to evaluate; give at least one")
    sides = _scored(state, pairs, loss, None, temperature)
    found = _reported(sides, pair_loss(*sides, loss), None)
    return {name: float(values.mean()) for name, values in found.items()} | {
        "pairs": float(len(pairs))
    }


def _metric_names(objective: PreferenceObjective) -> tuple[str, ...]:
    """The metrics of the step's components."""
    weights = WEIGHT_METRICS if objective.weight_cap is not None else ()
    return PAIR_METRICS + weights + (("ce/loss",) if objective.ce_coef else ())


def _prepared(
    state: LearnerState, table: pa.Table, objective: PreferenceObjective, temperature: float
) -> _Prepared:
    """Prepare a step on pairs, or on single completions."""
    if isinstance(objective.loss, Kto):
        return _unpaired(state, table, objective.loss, temperature)
    return _paired(state, table, objective.loss, objective.weight_cap, temperature)


def _paired(
    state: LearnerState,
    table: pa.Table,
    loss: PairLoss,
    weight_cap: float | None,
    temperature: float,
) -> _Prepared:
    """Prepare a step on pairs. A pair whose sides do not fit into one micro-batch is computed
    ahead."""
    pairs = pairs_of(table, loss.has_reference, weight_cap is not None)
    examples, long = split_pairs(state, pairs)
    weight = 1 / len(pairs)
    by_age = OLDEST_VERSION_COLUMN in table.column_names
    ahead: dict[str, float] = {}
    if long:
        alone, found = _computed_ahead(state, long, weight, loss, weight_cap, temperature, by_age)
        examples += alone
        ahead = {name: weight * float(values.sum()) for name, values in found.items()}
        ahead["loss"] = ahead["pref/loss"]
    added = {"pairs": float(len(pairs)), "long_pairs": float(len(long))}
    ages = Counter(_ages(state, pairs).tolist() if by_age else ())
    means = {f"{MARGIN_AT_STALENESS}{age:g}": len(pairs) / ages[age] for age in sorted(ages)}
    component = partial(_pair_component, loss, weight_cap, weight, by_age)
    return _Prepared(examples, component, ahead, added, means)


def _ages(state: LearnerState, pairs: Sequence[Pair]) -> Tensor:
    """The staleness [B] of each pair's older side."""
    return torch.tensor([float(state.applied - chosen.versions[0]) for chosen, _ in pairs])


def _computed_ahead(
    state: LearnerState,
    pairs: Sequence[Pair],
    weight: float,
    loss: PairLoss,
    weight_cap: float | None,
    temperature: float,
    by_age: bool,
) -> tuple[list[Example], dict[str, Tensor]]:
    """The first pass of long pairs (a collective). Returns their sides with the derivative of the
    step's loss for each, and the values [B] of their metrics."""
    sides = _scored(state, pairs, loss, weight_cap, temperature)
    for side in sides:
        side.logprobs.requires_grad_()
    preferred = pair_loss(*sides, loss, weight_cap)
    sums = sides[0].logprobs, sides[1].logprobs
    examples = sides_alone(pairs, weight * preferred.loss.sum(), sums)
    ages = _ages(state, pairs) if by_age else None
    return examples, _reported(sides, preferred, weight_cap, ages)


def _scored(
    state: LearnerState,
    pairs: Sequence[Pair],
    loss: PairLoss,
    weight_cap: float | None,
    temperature: float,
) -> Sides:
    """Both sides of these pairs, with the learner's log-probs (a collective). The same on every
    rank."""
    examples = [side for pair in pairs for side in pair]
    found = Completions(
        side_sums(state, examples, temperature),
        torch.tensor([example.loss_tokens for example in examples]),
        _sums(examples, "reference_logprobs") if loss.has_reference else None,
        _sums(examples, "behavior_logprobs") if weight_cap is not None else None,
    )
    index = torch.arange(len(pairs))
    return found.at(2 * index), found.at(2 * index + 1)


def side_sums(state: LearnerState, examples: Sequence[Example], temperature: float) -> Tensor:
    """The summed log-prob of each example's loss tokens, [number of examples] float64 on the CPU,
    without gradient (a collective). The same on every rank."""
    return values_of(
        state, examples, temperature, lambda logprobs, _, batch: _of_trajectories(logprobs, batch)
    )


def _sums(examples: Sequence[Example], name: str) -> Tensor:
    """The sums [number of examples] float64 of a per-token field over the loss tokens."""
    found = (getattr(example, name)[example.loss_mask] for example in examples)
    return torch.tensor(np.array([values.sum(dtype=np.float64) for values in found]))


def _of_trajectories(values: Tensor, batch: MicroBatch) -> Tensor:
    """The sums [B] float64 of the values [N] of each trajectory's loss tokens."""
    return sequence_sum(values.double(), batch.sequence, len(batch.order))


def _completions(
    logprobs: Tensor, batch: MicroBatch, loss: PairLoss | Kto, weight_cap: float | None = None
) -> Completions:
    """The completions of a micro-batch, one for each trajectory."""
    return Completions(
        _of_trajectories(logprobs, batch),
        torch.tensor(batch.counts, device=logprobs.device),
        (
            _of_trajectories(batch.reference_logprobs, batch)
            if loss.has_reference and batch.reference_logprobs is not None
            else None
        ),
        _of_trajectories(batch.behavior_logprobs, batch) if weight_cap is not None else None,
    )


def _pair_component(
    loss: PairLoss,
    weight_cap: float | None,
    weight: float,
    by_age: bool,
    logprobs: Tensor,
    entropy: Tensor,
    values: Tensor,
    batch: MicroBatch,
) -> tuple[Tensor, LossSums]:
    """The component `pref` of a micro-batch of pairs, each with this weight. The sides of long
    pairs have no loss here, only a gradient."""
    total = gradient_alone(logprobs, batch)
    parts: dict[str, Tensor] = {}
    if batch.pairs:
        chosen, rejected = torch.tensor(batch.pairs, device=logprobs.device).T
        completions = _completions(logprobs, batch, loss, weight_cap)
        sides = completions.at(chosen), completions.at(rejected)
        preferred = pair_loss(*sides, loss, weight_cap)
        total = total + weight * preferred.loss.sum()
        ages = _of_trajectories(batch.ages, batch) / completions.tokens if by_age else None
        found = _reported(sides, preferred, weight_cap, None if ages is None else ages[chosen])
        parts = {name: weight * values.sum() for name, values in found.items()}
    return total, supervised_sums(total, logprobs, parts)


def _reported(
    sides: Sides, preferred: Preferred, weight_cap: float | None, ages: Tensor | None = None
) -> dict[str, Tensor]:
    """The values [B] of B pairs whose means are the metrics. With their ages [B], also the margins
    of the pairs of each age, and 0 for the others."""
    chosen, rejected = preferred.rewards
    found = {
        "pref/loss": preferred.loss.detach(),
        "pref/accuracy": (chosen > rejected).double(),
        "pref/margin": chosen - rejected,
        "pref/chosen_reward": chosen,
        "pref/rejected_reward": rejected,
        "pref/chosen_logprob": sides[0].logprobs.detach(),
        "pref/rejected_logprob": sides[1].logprobs.detach(),
    }
    if weight_cap is not None:
        found |= {
            "pref/weight_mean": preferred.weights,
            "pref/capped_fraction": preferred.capped.double(),
        }
    for age in [] if ages is None else ages.unique().tolist():
        found[f"{MARGIN_AT_STALENESS}{age:g}"] = (chosen - rejected) * (ages == age)
    return found


def _unpaired(state: LearnerState, table: pa.Table, kto: Kto, temperature: float) -> _Prepared:
    """Prepare a step of KTO. Its baseline is a mean over the whole step, so it is computed
    ahead."""
    rows = unpaired_of(table)
    learner = side_sums(state, rows.mismatched, temperature)
    log_ratios = learner - _sums(rows.mismatched, "reference_logprobs")
    baseline = kto_baseline(float(log_ratios.sum()), len(log_ratios))
    desirable = sum(bool(example.chosen) for example in rows.completions)
    counts = desirable, len(rows.completions) - desirable
    added = {"pref/kl": baseline, "completions": float(len(rows.completions))}
    for count, side in zip(counts, SIDES, strict=True):
        if not count:
            absent = ("pref/margin", f"pref/{side}_reward", f"pref/{side}_logprob")
            added |= dict.fromkeys(absent, float("nan"))
    component = partial(_kto_component, kto, baseline, counts)
    return _Prepared(rows.completions, component, added=added)


def _held_out_unpaired(
    state: LearnerState, table: pa.Table, kto: Kto, temperature: float
) -> dict[str, float]:
    """The metrics of KTO on held-out completions (a collective)."""
    if not table.num_rows:
        raise ValueError("there are no held-out completions to evaluate; give at least one")
    step = _unpaired(state, table, kto, temperature)
    completions = Completions(
        side_sums(state, step.examples, temperature),
        torch.tensor([example.loss_tokens for example in step.examples]),
        _sums(step.examples, "reference_logprobs"),
    )
    desirable = torch.tensor([bool(example.chosen) for example in step.examples])
    counts = int(desirable.sum()), int((~desirable).sum())
    preferred = kto_loss(completions, desirable, step.added["pref/kl"], kto)
    parts = _kto_parts(completions, desirable, preferred, step.added["pref/kl"], counts, kto)
    return {name: float(value) for name, value in parts.items()} | dict(step.added)


def _kto_component(
    kto: Kto,
    baseline: float,
    counts: tuple[int, int],
    logprobs: Tensor,
    entropy: Tensor,
    values: Tensor,
    batch: MicroBatch,
) -> tuple[Tensor, LossSums]:
    """The component `pref` of a micro-batch of single completions. `counts` are the step's
    desirable and undesirable ones."""
    loss = 0.0 * logprobs.sum(dtype=torch.float64)
    if not batch.order:
        return loss, supervised_sums(loss, logprobs)
    completions = _completions(logprobs, batch, kto)
    desirable = torch.tensor(batch.chosen, device=logprobs.device).bool()
    preferred = kto_loss(completions, desirable, baseline, kto)
    loss = loss + preferred.loss.sum() / sum(counts)
    parts = _kto_parts(completions, desirable, preferred, baseline, counts, kto)
    return loss, supervised_sums(loss, logprobs, parts)


def _kto_parts(
    completions: Completions,
    desirable: Tensor,
    preferred: Preferred,
    baseline: float,
    counts: tuple[int, int],
    kto: Kto,
) -> dict[str, Tensor]:
    """The shares of the step's metrics of some of its completions."""
    weight = 1 / sum(counts)
    (reward,) = preferred.rewards
    right = torch.where(desirable, reward > kto.beta * baseline, reward < kto.beta * baseline)
    parts = {
        "pref/loss": weight * preferred.loss.detach().sum(),
        "pref/accuracy": weight * right.sum(),
    }
    for side, count, of_side in zip(SIDES, counts, (desirable, ~desirable), strict=True):
        share = of_side / max(count, 1)
        parts[f"pref/{side}_reward"] = (share * reward).sum()
        parts[f"pref/{side}_logprob"] = (share * completions.logprobs.detach()).sum()
    parts["pref/margin"] = parts["pref/chosen_reward"] - parts["pref/rejected_reward"]
    return parts
