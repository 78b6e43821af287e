"""Surrogate losses: one value for each of N tokens, in nats, and a mask of the tokens that the
surrogate clips. Log-probs, log-ratios and advantages have shape [N]."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncrl.algorithms.corrections import LOG_RATIO_LIMIT, sequence_mean, sequence_sum
from asyncrl.algorithms.objective_spec import VespoSpec

__all__ = [
    "cispo",
    "clip_cov",
    "dppo",
    "gmpo",
    "gspo_log_ratio",
    "kl_cov",
    "log_linear_proximal",
    "ppo_clip",
    "reinforce",
    "sapo",
    "vespo",
]


def ppo_clip(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return -min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A), and where the clip stops the
    gradient (PPO, arXiv:1707.06347, eq. 7).

    DAPO separates the upper clip from the lower one (arXiv:2503.14476, section 3.1). For A < 0,
    dual_clip c > 1 bounds the loss by -c·A (arXiv:1912.09729, eq. 5).
    """
    ratio = log_ratio.exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    stopped = ((advantages > 0) & (ratio > 1 + clip_high)) | (
        (advantages < 0) & (ratio < 1 - clip_low)
    )
    if dual_clip is not None:
        stopped = stopped | ((advantages < 0) & (ratio > dual_clip))
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss, stopped


def gspo_log_ratio(log_ratio: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """Return each trajectory's mean log-ratio at each of its tokens, with the token's own gradient
    (GSPO-token, arXiv:2507.18071, eq. 13-14).

    Under PPO's clip, a whole trajectory is then inside or outside. The paper averages over
    trajectories of token means (`loss_aggregation: sequence_mean_token_mean`) and clips at 3e-4 and
    4e-4. Those clips suit long answers that are nearly on policy. Stale tokens of short answers
    need PPO's clips.
    """
    mean = sequence_mean(log_ratio.detach(), sequence, sequences)[sequence]
    return mean + log_ratio - log_ratio.detach()


def gmpo(
    log_ratio: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    sequences: int,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Return -A times the geometric mean of a trajectory's clipped ratios, at each of its tokens
    with the token's own gradient, and where the clip stops it (GMPO, arXiv:2507.20673, section 3).

    A token's ratio is bounded by 1 + clip_high where A > 0, and by 1 - clip_low where A < 0. The
    paper bounds log-ratios by ±0.4, which is clip_low = 0.33 and clip_high = 0.49. It averages over
    trajectories (`loss_aggregation: sequence_mean_token_mean`). A trajectory needs one advantage.
    """
    low = math.log(1 - clip_low) if clip_low < 1 else -math.inf
    high = math.log1p(clip_high)
    bounded = torch.where(advantages < 0, log_ratio.clamp(min=low), log_ratio.clamp(max=high))
    stopped = ((advantages > 0) & (log_ratio > high)) | ((advantages < 0) & (log_ratio < low))
    # The same arithmetic as GSPO's, after the clip instead of before it.
    return -gspo_log_ratio(bounded, sequence, sequences).exp() * advantages, stopped


def clip_cov(
    log_ratio: Tensor, advantages: Tensor, selected: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped loss, but 0 at the selected tokens, and where either stops the gradient
    (Clip-Cov, arXiv:2505.22617, section 4.2; PPO's clip is in the authors' code).

    Args:
        selected: [N] bool, from `covariance.drawn_between` over the whole step.
    """
    loss, stopped = ppo_clip(log_ratio, advantages, clip_low, clip_high)
    return torch.where(selected, torch.zeros_like(loss), loss), stopped | selected


def kl_cov(
    log_ratio: Tensor, advantages: Tensor, selected: Tensor, coef: float
) -> tuple[Tensor, Tensor]:
    """Return -r·A, plus coef · |log r| at the selected tokens (KL-Cov, arXiv:2505.22617, section
    4.2). No token is clipped.

    The authors' code estimates the KL divergence from the old policy by |log r|. Its gradient is
    ±coef, and 0 at r = 1.

    Args:
        selected: [N] bool, from `covariance.largest` over the whole step.
    """
    penalty = torch.where(selected, coef * log_ratio.abs(), torch.zeros_like(log_ratio))
    loss = penalty - log_ratio.exp() * advantages
    return loss, torch.zeros_like(advantages, dtype=torch.bool)


def vespo(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    sequences: int,
    shape: VespoSpec,
) -> tuple[Tensor, Tensor]:
    """Return -sg(φ(W))·A·log π, with W the product of a trajectory's ratios (VESPO,
    arXiv:2602.10693).

    φ(W) = W^k · exp(λ·(1 - W)), with k and λ by the sign of A. It is 1 on policy, largest at
    W = k / λ, and falls to 0 on both sides, so no token is clipped. A trajectory needs one
    advantage.
    """
    total = sequence_sum(log_ratio.detach(), sequence, sequences)[sequence]
    log_w = total.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    good = advantages >= 0
    power = torch.where(good, torch.full_like(log_w, shape.k_positive), shape.k_negative)
    decay = torch.where(good, torch.full_like(log_w, shape.lambda_positive), shape.lambda_negative)
    weight = (power * log_w + decay * (1 - log_w.exp())).exp()
    return -weight * advantages * logprobs, torch.zeros_like(advantages, dtype=torch.bool)


def cispo(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return -sg(clip(r, 1 - clip_low, 1 + clip_high))·A·log π, and the tokens whose weight is
    clipped (MiniMax-M1, arXiv:2506.13585, eq. 4-5).

    Every token keeps a gradient. The paper sets no lower bound, so clip_low is 1 here by default.
    A lower bound would raise the weight of tokens that the learner now rarely samples.
    """
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs, weight != ratio


def sapo(
    log_ratio: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float
) -> tuple[Tensor, Tensor]:
    """Return -σ(τ·(r - 1))·(4/τ)·A, with τ by the sign of A (SAPO, arXiv:2511.20347, eq. 5-6).

    This soft gate replaces the clip, so no token is clipped. At r = 1 its gradient is the policy
    gradient.
    """
    tau = torch.where(advantages > 0, torch.full_like(advantages, tau_positive), tau_negative)
    loss = -torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau * advantages
    return loss, torch.zeros_like(advantages, dtype=torch.bool)


def dppo(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, threshold: float
) -> tuple[Tensor, Tensor]:
    """Return -r·A, without a gradient where the token's probability has moved too far (DPPO with
    the binary total variation, arXiv:2602.04879, section 4).

    Too far means more than the threshold away from the behavior policy's probability, in the
    direction in which A pushes it.
    """
    moved = logprobs.detach().exp() - behavior_logprobs.exp()
    stopped = ((advantages > 0) & (moved > threshold)) | ((advantages < 0) & (moved < -threshold))
    ratio = (logprobs - behavior_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return torch.where(stopped, torch.zeros_like(ratio), -ratio * advantages), stopped


def reinforce(logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """Return -A·log π (Williams 1992). Stale tokens need a truncated weight. No token is
    clipped."""
    return -advantages * logprobs, torch.zeros_like(advantages, dtype=torch.bool)


def log_linear_proximal(logprobs: Tensor, behavior_logprobs: Tensor, ages: Tensor) -> Tensor:
    """Estimate the log-probs [N] of the policy one version before the learner's (A-3PO,
    arXiv:2512.06547, section 3).

    The estimate interpolates from the behavior policy, `ages` versions before:
    log μ + (age - 1)/age · (log π - log μ). At age 0 it is log π.
    """
    share = torch.where(ages > 0, (ages - 1) / ages.clamp(min=1), torch.ones_like(ages))
    return behavior_logprobs + share * (logprobs.detach() - behavior_logprobs)
