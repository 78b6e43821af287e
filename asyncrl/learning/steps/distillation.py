"""The teacher's part of a policy step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from asyncrl.algorithms.distillation import reverse_kl_terms, teacher_advantages
from asyncrl.algorithms.loss_metrics import LossSums, supervised_sums
from asyncrl.algorithms.top_k import top_k_reverse_kl
from asyncrl.config import DistillationConfig
from asyncrl.config.distillation import TeacherAdvantage
from asyncrl.contracts.rows import TEACHER_SECONDS_COLUMN
from asyncrl.models.micro_batches import Example, MicroBatch, trajectories_of

DISTILL = "distill"
"""The divergence from the teacher over top_k tokens: a component of the loss."""
DISTILL_PARTS = ("distill/top_k_kl", "distill/tail")
"""The metrics of that component."""


def with_teacher_advantages(
    examples: Sequence[Example], distillation: DistillationConfig
) -> list[Example]:
    """The examples with one advantage per completion token: reward_weight times the rewards'
    advantage, plus the teacher's with `use: advantage`.

    The teacher's advantages are taken minus their mean over the loss tokens of the step's other
    trajectories. A student is worse than its teacher on most tokens that the teacher would not
    sample, so almost all advantages would be negative. The mean does not depend on the trajectory
    itself, so it changes no expectation, but much of the noise. One trajectory alone keeps its own.

    Raises:
        ValueError: an example has no log-probs of the teacher, or one that is not finite.
    """
    of_rewards = [
        distillation.reward_weight * np.asarray(example.advantage, np.float64)
        for example in examples
    ]
    if not isinstance(distillation.use, TeacherAdvantage):
        return [
            replace(example, advantage=rewards if rewards.ndim else float(rewards))
            for example, rewards in zip(examples, of_rewards, strict=True)
        ]
    of_teacher = [
        teacher_advantages(*_logprobs(example), distillation.use.coef) for example in examples
    ]
    means = _means_of_others(np.array(trajectories_of(examples), np.int64), of_teacher)
    return [
        replace(example, advantage=_at_loss_tokens(example, values - mean, rewards))
        for example, values, mean, rewards in zip(
            examples, of_teacher, means, of_rewards, strict=True
        )
    ]


def _means_of_others(trajectories: np.ndarray, values: Sequence[np.ndarray]) -> np.ndarray:
    """For each example, the mean of the values of the other trajectories; 0 without another one."""
    sums = np.bincount(trajectories, [value.sum() for value in values])
    counts = np.bincount(trajectories, [value.size for value in values])
    others = counts.sum() - counts
    means: np.ndarray = ((sums.sum() - sums) / np.maximum(others, 1)).take(trajectories)
    return means


def _at_loss_tokens(example: Example, values: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """The sum of values and rewards at the loss tokens, 0 elsewhere."""
    mask, full = example.loss_mask, np.zeros(len(example.loss_mask))
    full[mask] = values
    return np.where(mask, full + rewards, 0.0)


def _logprobs(example: Example) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of the loss tokens by the behavior policy and by the teacher."""
    if example.reference_logprobs is None:
        raise ValueError(
            f"group {example.group}: trajectory {example.trajectory} has no log-probs of the"
            " teacher; score it again"
        )
    mask = example.loss_mask
    return example.behavior_logprobs[mask], example.reference_logprobs[mask]


def top_k_loss(
    logprobs: Tensor, entropy: Tensor, values: Tensor, batch: MicroBatch
) -> tuple[Tensor, LossSums]:
    """The component `distill` of a micro-batch: its mean reverse KL divergence from the teacher, in
    nats. It is at the states that the behavior policy reached, without a weight for stale ones."""
    weights, ours, theirs = (
        batch.components.get(DISTILL),
        batch.learner_logprobs,
        batch.teacher_logprobs,
    )
    if weights is None or ours is None or theirs is None or batch.reference_logprobs is None:
        loss = 0.0 * logprobs.sum()
        return loss, supervised_sums(loss, logprobs)
    divergence, tail = top_k_reverse_kl(
        torch.cat([logprobs[:, None], ours], 1),
        torch.cat([batch.reference_logprobs[:, None], theirs], 1),
    )
    loss = (weights * divergence).sum()
    parts = dict(zip(DISTILL_PARTS, (loss.detach(), (weights * tail).sum()), strict=True))
    return loss, supervised_sums(loss, logprobs, parts)


def distillation_metrics(
    examples: Sequence[Example], tables: Sequence[pa.Table]
) -> dict[str, float]:
    """Mean of log π_behavior - log π_teacher over the step's loss tokens, in nats, and the mean
    seconds of the teacher's answer for a group. NaN without tokens."""
    terms = [reverse_kl_terms(*_logprobs(example)) for example in examples]
    seconds = [
        value
        for table in tables
        if TEACHER_SECONDS_COLUMN in table.column_names
        for value in table[TEACHER_SECONDS_COLUMN].to_pylist()
        if value is not None
    ]
    return {
        "distill/reverse_kl": float(np.concatenate(terms).mean()) if terms else float("nan"),
        "distill/teacher_s": float(np.mean(seconds)) if seconds else float("nan"),
    }
