"""The KL divergence from a frozen reference policy, in the reward or in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

__all__ = ["LOG_RATIO_LIMIT", "LOW_VAR_LIMIT", "KLEstimator", "reward_kl"]

KLEstimator = Literal["k1", "k2", "k3", "low_var"]

LOW_VAR_LIMIT = 10.0
"""Largest k3 of one token under `low_var`, in nats."""
LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this many nats: exp(20) is still finite in float32."""


def reward_kl(logprobs: Sequence[float], reference_logprobs: Sequence[float], estimator: KLEstimator) -> float:
    """Estimate of KL(behaviour || reference) of one trajectory, in nats: the sum over its T tokens, which the behaviour policy sampled.

    With l = log π_ref - log μ per token: k1 = -l (unbiased), k2 = l²/2, k3 = e^l - 1 - l (unbiased, never negative), low_var = k3, at most 10
    (http://joschu.net/blog/kl-approx.html). Log-ratios are clamped to ± 20 nats.

    Raises:
        ValueError: the lengths differ.
    """
    if len(logprobs) != len(reference_logprobs):
        raise ValueError(f"{len(logprobs)} log-probs came with {len(reference_logprobs)} of the reference")
    log_ratio = np.clip(np.asarray(reference_logprobs, dtype=np.float64) - np.asarray(logprobs, dtype=np.float64), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match estimator:
        case "k1":
            values = -log_ratio
        case "k2":
            values = log_ratio**2 / 2
        case "k3":
            values = np.exp(log_ratio) - 1 - log_ratio
        case "low_var":
            values = np.minimum(np.exp(log_ratio) - 1 - log_ratio, LOW_VAR_LIMIT)
    return float(values.sum())
