"""Losses as sums over tokens. The caller divides by the step's global token count, so packing and ranks cannot change the gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LOG_RATIO_LIMIT", "LossSums", "policy_loss", "supervised_loss"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to ± this many nats: exp(20) is still finite in float32."""


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over the N loss tokens of one micro-batch, detached scalars. Divide by tokens for means; `ratio_max` is a maximum."""

    loss: Tensor
    ratio: Tensor
    ratio_max: Tensor
    clipped: Tensor
    kl_k1: Tensor
    kl_k3: Tensor
    nonfinite: Tensor
    """Tokens whose log-prob, on either side, is NaN or Inf."""


def policy_loss(logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float) -> tuple[Tensor, LossSums]:
    """Clipped policy loss, corrected for the behaviour policy: sum over tokens of -min(r·A, clip(r, 1 - eps_clip, 1 + eps_clip_high)·A).

    r = π_learner / π_behaviour per token, with π_behaviour from the engine that sampled (PPO, arXiv:1707.06347, eq. 7; the upper clip
    apart from the lower: DAPO, arXiv:2503.14476, section 3.1). All inputs are [N], log-probs in nats.

    kl_k1 and kl_k3 estimate KL(behaviour || learner) per token: -log r, and r - 1 - log r (http://joschu.net/blog/kl-approx.html).

    Returns:
        The loss (a sum, with gradient) and detached sums for metrics.
    """
    if not logprobs.shape == behaviour_logprobs.shape == advantages.shape:
        raise ValueError(
            f"log-probs {tuple(logprobs.shape)}, behaviour {tuple(behaviour_logprobs.shape)}, advantages {tuple(advantages.shape)} must have one shape"
        )
    raw = logprobs - behaviour_logprobs
    log_ratio = raw.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages).sum()
    with torch.no_grad():
        is_clipped = ((advantages > 0) & (ratio > 1 + eps_clip_high)) | ((advantages < 0) & (ratio < 1 - eps_clip))
        sums = LossSums(
            loss=loss.detach(),
            ratio=ratio.sum(),
            ratio_max=ratio.max() if ratio.numel() else ratio.new_zeros(()),
            clipped=is_clipped.sum(),
            kl_k1=-log_ratio.sum(),
            kl_k3=(ratio - 1 - log_ratio).sum(),
            nonfinite=(~torch.isfinite(raw)).sum(),
        )
    return loss, sums


def supervised_loss(logprobs: Tensor) -> tuple[Tensor, LossSums]:
    """Negative log-likelihood of the target tokens [N], summed, in nats. The ratio metrics are those of an on-policy step."""
    loss = -logprobs.sum()
    zero = logprobs.new_zeros(())
    with torch.no_grad():
        one = logprobs.new_ones(())
        sums = LossSums(loss.detach(), one * logprobs.numel(), one, zero, zero, zero, (~torch.isfinite(logprobs)).sum())
    return loss, sums
