"""Estimates of the KL divergence of two policies. Importing this needs neither torch nor numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

KLEstimator: TypeAlias = Literal["k1", "k2", "k3", "low_var"]

LOW_VAR_LIMIT = 10.0
"""Cap on one token's k3 with `low_var`, in nats."""
LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this many nats. exp(20) is still finite in float32."""


def kl_estimate(log_ratio: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(p || q) at each token sampled from p, with l = log_ratio = log q - log p.

    k1 = -l, k2 = l²/2, k3 = exp(l) - 1 - l, and low_var is k3 capped at 10
    (http://joschu.net/blog/kl-approx.html)."""
    clamped = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return -clamped
    if estimator == "k2":
        return clamped.square() / 2
    # expm1, because exp(l) - 1 has a rounding error of 1e-7 in float32: all of k3 at l = 5e-4.
    k3 = clamped.expm1() - clamped
    return k3.clamp(max=LOW_VAR_LIMIT) if estimator == "low_var" else k3


def reward_kl(
    logprobs: Sequence[float],
    reference_logprobs: Sequence[float],
    loss_mask: Sequence[int] | None = None,
) -> float:
    """Estimate KL(behavior || reference) of one trajectory by k1, in nats.

    This is the sum of log μ - log π_ref over its T tokens, which the behavior policy μ sampled.
    With a loss mask [T], it is over those with 1 only: a session has turns that are not trained.
    Log-ratios are clamped to ± 20 nats.

    In the gradient, a reward is a constant that multiplies ∇log μ, and E[k1 · ∇log μ] is the
    gradient of the divergence. The other estimators estimate its value but not its gradient. k3
    would give the gradient of KL(μ || π_ref) - KL(π_ref || μ), which vanishes near the reference.

    Raises:
        ValueError: the lengths differ.
    """
    if len(logprobs) != len(reference_logprobs):
        raise ValueError(
            f"{len(logprobs)} log-probs came with {len(reference_logprobs)} of the reference"
            " policy; give one of each for every token"
        )
    import numpy as np

    log_ratio = np.clip(
        np.asarray(reference_logprobs, dtype=np.float64) - np.asarray(logprobs, dtype=np.float64),
        -LOG_RATIO_LIMIT,
        LOG_RATIO_LIMIT,
    )
    if loss_mask is not None:
        log_ratio = log_ratio[np.asarray(loss_mask, dtype=bool)]
    return float(-log_ratio.sum())
