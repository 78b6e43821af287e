"""The teacher's part of a policy step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from asyncrl.algorithms.distillation import reverse_kl_terms, teacher_advantages
from asyncrl.config import DistillationConfig
from asyncrl.contracts.rows import TEACHER_SECONDS_COLUMN
from asyncrl.models.micro_batches import Example

__all__ = ["distillation_metrics", "with_teacher_advantages"]


def with_teacher_advantages(
    examples: Sequence[Example], distillation: DistillationConfig
) -> list[Example]:
    """The examples with one advantage per completion token: reward_weight times the rewards'
    advantage, plus the teacher's with `use: advantage`.

    The teacher's advantages are taken minus their mean over the step's loss tokens. A student is
    worse than its teacher on most tokens that the teacher would not sample, so almost all
    advantages would be negative. A constant changes no expectation, and much of the noise.

    Raises:
        ValueError: an example has no log-probs of the teacher, or one that is not finite.
    """
    of_rewards = [
        distillation.reward_weight * np.asarray(example.advantage, np.float64)
        for example in examples
    ]
    if not distillation.adds_advantage:
        return [
            replace(example, advantage=rewards if rewards.ndim else float(rewards))
            for example, rewards in zip(examples, of_rewards, strict=True)
        ]
    of_teacher = [
        teacher_advantages(*_logprobs(example), distillation.coef) for example in examples
    ]
    mean = float(np.concatenate(of_teacher).mean()) if of_teacher else 0.0
    return [
        replace(example, advantage=_at_loss_tokens(example, values - mean, rewards))
        for example, values, rewards in zip(examples, of_teacher, of_rewards, strict=True)
    ]


def _at_loss_tokens(example: Example, values: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """The sum of both at the loss tokens, 0 elsewhere."""
    places, full = example.loss_mask, np.zeros(len(example.loss_mask))
    full[places] = values
    return np.where(places, full + rewards, 0.0)


def _logprobs(example: Example) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs of the loss tokens by the behavior policy and by the teacher."""
    if example.reference_logprobs is None:
        raise ValueError(
            f"group {example.group}: trajectory {example.trajectory} has no log-probs of the"
            " teacher; score it again"
        )
    mask = example.loss_mask
    return example.behavior_logprobs[mask], example.reference_logprobs[mask]


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
