"""One step of a reward model: trains the scores of both sides of pairs.

A sequence's score is a linear map of the last layer's output at its last target, as in
transformers' sequence classifiers, which take the last token. A micro-batch keeps the outputs that
predict a loss token. So each side gets one more token, which is its only loss token and is never
read.

As in `preference_step`, a pair that is too long for a micro-batch is computed in two passes
(`long_pairs`), by the scores of its sides.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from asyncrl.algorithms.loss_metrics import LossSums, supervised_sums
from asyncrl.algorithms.reward_model import bradley_terry
from asyncrl.learning.engine.state import LearnerState
from asyncrl.learning.examples.offline_examples import Pair, pairs_of
from asyncrl.learning.steps.blame import keep_if_bad, name_culprit
from asyncrl.learning.steps.long_pairs import gradient_alone, sides_alone, split_pairs, values_of
from asyncrl.learning.steps.passes import train
from asyncrl.models.micro_batches import Example, MicroBatch, plain_example

logger = logging.getLogger(__name__)

METRICS = (
    "pref/loss",
    "pref/accuracy",
    "pref/margin",
    "pref/chosen_reward",
    "pref/rejected_reward",
)
UNREAD = 0
"""Id of the token after a sequence."""


def reward_step(state: LearnerState, table: pa.Table, center_coef: float) -> dict[str, float]:
    """Take one step on a table of pairs with PREFERENCE_SCHEMA (a collective). The learning rates
    are the scheduled ones.

    The step is skipped on all ranks if any rank finds NaN or Inf. Its rows, and those of a step
    with a spike of the gradient norm, are kept. The log of this process has their path.

    Raises:
        ValueError: there is no pair, or a side is longer than a micro-batch.
    """
    pairs = _pairs(table)
    weight = 1 / len(pairs)
    examples, long = split_pairs(state, pairs)
    ahead: dict[str, float] = {}
    if long:
        alone, ahead = _computed_ahead(state, long, weight, center_coef)
        examples += alone
    weights, loss = [1.0] * len(examples), partial(_component, center_coef, weight)
    rate, head_rate = (
        state.scheduled(peak) for peak in (state.learning_rate, state.value_learning_rate)
    )
    metrics = train(state, examples, weights, loss, rate, head_rate, 1.0, METRICS)
    metrics |= {name: metrics[name] + share for name, share in ahead.items()}
    metrics |= {"pairs": float(len(pairs)), "long_pairs": float(len(long))}
    if metrics["applied"]:
        state.trained_tokens += int(metrics["tokens"])
        metrics["grad_norm_ratio"] = state.norms.ratio(metrics["grad_norm"])
    find_culprit = partial(name_culprit, state, examples, weights, loss, 1.0)
    if note := keep_if_bad(state, metrics, f"reward_{state.applied:06d}", [table], find_culprit):
        logger.warning("reward step %d: %s", state.applied, note)
    return metrics


def held_out_scores(state: LearnerState, table: pa.Table, center_coef: float) -> dict[str, float]:
    """The metrics of a step on these pairs, without a step (a collective).

    Returns:
        Means per pair, under the names of a step's metrics, and `pairs`.

    Raises:
        ValueError: as in `reward_step`.
    """
    pairs = _pairs(table)
    chosen, rejected = _sides(state, pairs)
    found = _reported(chosen, rejected, bradley_terry(chosen, rejected, center_coef))
    return {name: float(values.mean()) for name, values in found.items()} | {
        "pairs": float(len(pairs))
    }


def _pairs(table: pa.Table) -> list[Pair]:
    """The pairs of a table, each side with one more token as its only loss token."""
    pairs = pairs_of(table, reference=False, behavior=False)
    if not pairs:
        raise ValueError("a reward model got no pairs; give it at least one")
    return [(_scored(chosen), _scored(rejected)) for chosen, rejected in pairs]


def _scored(side: Example) -> Example:
    """The side up to its last target. A chat template may write more after the end of the turn,
    which a policy's own completions lack."""
    last = int(np.flatnonzero(side.loss_mask)[-1]) + side.prompt_length
    read = side.tokens[: last + 1]
    whole = plain_example(np.append(read, UNREAD), len(read), np.ones(1, dtype=bool))
    return replace(whole, chosen=side.chosen)


def _sides(state: LearnerState, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    """The scores [number of pairs] float64 of both sides on the CPU, without gradient (a
    collective). The same on every rank."""
    examples = [side for pair in pairs for side in pair]
    scores = values_of(state, examples, 1.0, lambda _, values, batch: values)
    return scores[0::2], scores[1::2]


def _computed_ahead(
    state: LearnerState, pairs: Sequence[Pair], weight: float, center_coef: float
) -> tuple[list[Example], dict[str, float]]:
    """The first pass of long pairs (a collective). Returns their sides with the derivative of the
    step's loss for each score, and their shares of the metrics."""
    chosen, rejected = (side.requires_grad_() for side in _sides(state, pairs))
    losses = bradley_terry(chosen, rejected, center_coef)
    examples = sides_alone(pairs, weight * losses.sum(), (chosen, rejected))
    found = _reported(chosen.detach(), rejected.detach(), losses.detach())
    shares = {name: weight * float(values.sum()) for name, values in found.items()}
    return examples, {**shares, "loss": shares["pref/loss"]}


def _component(
    center_coef: float,
    weight: float,
    logprobs: Tensor,
    entropy: Tensor,
    scores: Tensor,
    batch: MicroBatch,
) -> tuple[Tensor, LossSums]:
    """The loss of a micro-batch of pairs, each with this weight. The sides of long pairs have no
    loss here, only a gradient."""
    loss = 0.0 * logprobs.sum(dtype=torch.float64) + gradient_alone(scores, batch)
    parts: dict[str, Tensor] = {}
    if batch.pairs:
        chosen, rejected = (scores[list(side)] for side in zip(*batch.pairs, strict=True))
        losses = bradley_terry(chosen, rejected, center_coef)
        loss = loss + weight * losses.sum()
        found = _reported(chosen.detach(), rejected.detach(), losses.detach())
        parts = {name: weight * values.sum() for name, values in found.items()}
    return loss, supervised_sums(loss, logprobs, parts)


def _reported(chosen: Tensor, rejected: Tensor, losses: Tensor) -> dict[str, Tensor]:
    """The values [B] of B pairs whose means are the metrics."""
    return {
        "pref/loss": losses,
        "pref/accuracy": (chosen > rejected).double(),
        "pref/margin": (chosen - rejected).double(),
        "pref/chosen_reward": chosen.double(),
        "pref/rejected_reward": rejected.double(),
    }
