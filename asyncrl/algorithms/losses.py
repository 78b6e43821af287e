"""Losses as weighted sums over tokens. The weights come from the whole step (`token_weights`), so packing and ranks cannot change the gradient.

A policy loss is a surrogate per token, times a truncated weight for the way from the behaviour policy to the surrogate's old policy, times a mask:
`policy_loss` puts the three together as `AlgorithmConfig` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from asyncrl.algorithms.corrections import (
    LOG_RATIO_LIMIT,
    band_mask,
    importance_weights,
    kl_estimate,
    off_policy_sequence_mask,
    rejection_mask,
    sequence_max,
    sequence_mean,
)
from asyncrl.algorithms.own import is_own, own_loss
from asyncrl.algorithms.values import value_loss
from asyncrl.config import AlgorithmConfig, CorrectionConfig
from asyncrl.runtime.functions import FunctionError, import_function, where

__all__ = [
    "LossSums",
    "PolicyTokens",
    "cispo",
    "dppo",
    "gspo_log_ratio",
    "log_linear_proximal",
    "made_up_tokens",
    "own_metrics",
    "policy_loss",
    "ppo_clip",
    "reinforce",
    "sapo",
    "supervised_loss",
    "token_weights",
    "truncated_weights",
]


@dataclass(frozen=True, slots=True)
class LossSums:
    """Sums over the N loss tokens of one micro-batch, detached scalars. Divide by tokens for means; `ratio_max` is a maximum.

    The ratio is π_learner / π_behaviour, whatever the loss. `loss` is weighted already: its sum over micro-batches and ranks is the step's loss.
    """

    loss: Tensor
    ratio: Tensor
    ratio_squared: Tensor
    ratio_max: Tensor
    clipped: Tensor
    """Tokens whose gradient the surrogate's own clip stops, or whose weight it clips (CISPO)."""
    weight: Tensor
    """Truncated importance weights."""
    nonfinite: Tensor
    """Tokens whose log-prob, on either side, is NaN or Inf."""
    masked: Tensor | float = 0.0
    """Tokens that a correction masks, for whatever reason; one token may have several."""
    masked_band: Tensor | float = 0.0
    masked_rejected: Tensor | float = 0.0
    masked_sequence: Tensor | float = 0.0
    capped: Tensor | float = 0.0
    """Tokens whose importance weight the cap cut."""
    kl_k1: Tensor | float = 0.0
    kl_k3: Tensor | float = 0.0
    kl_reference: Tensor | float = 0.0
    """Estimates of KL(learner || reference)."""
    value_loss: Tensor | float = 0.0
    """The value head's part of the loss, weighted already."""
    drift: Tensor | float = 0.0
    """|log ratio| of tokens that the learner's own version made in a trajectory begun earlier: what the old KV cache does to them."""
    drift_tokens: Tensor | float = 0.0
    own: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics of the user's own loss."""


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """The N loss tokens of `sequences` trajectories, as the learner sees them now. Log-probs in nats."""

    logprobs: Tensor
    """[N], with gradient."""
    behaviour_logprobs: Tensor
    """[N], from the engine that sampled."""
    advantages: Tensor
    """[N]."""
    weights: Tensor
    """[N], of the step's loss: see `token_weights`."""
    sequence: Tensor
    """[N] int64: the trajectory of each token."""
    sequences: int
    ages: Tensor
    """[N] float: learner's version minus the version that made the token."""
    reference_logprobs: Tensor | None = None
    """[N], of the frozen reference policy."""
    values: Tensor | None = None
    """[N], of the value head, with gradient."""
    returns: Tensor | None = None
    """[N], what the values should be."""


def token_weights(
    lengths: Sequence[int],
    aggregation: Literal[
        "token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed"
    ],
    fixed_length: int,
) -> list[float]:
    """Weight of each loss token of each trajectory, from the loss tokens of all trajectories of the step (N in all). S counts the trajectories that have
    a loss token; one without has weight 0.

    token_mean: 1 / N (DAPO, arXiv:2503.14476, eq. 8). sequence_mean_token_mean: 1 / (S · its length) (GRPO, arXiv:2402.03300, eq. 3).
    sequence_mean_token_sum: 1 / S. fixed: 1 / (S · fixed_length) (Dr.GRPO, arXiv:2503.20783, with the longest completion allowed).
    """
    count, tokens = sum(length > 0 for length in lengths), sum(lengths)

    def of_token(length: int) -> float:
        match aggregation:
            case "token_mean":
                return 1 / tokens
            case "sequence_mean_token_mean":
                return 1 / (count * length)
            case "sequence_mean_token_sum":
                return 1 / count
            case "fixed":
                return 1 / (count * fixed_length)

    return [of_token(length) if length else 0.0 for length in lengths]


def ppo_clip(
    log_ratio: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """-min(r·A, clip(r, 1 - eps_clip, 1 + eps_clip_high)·A) per token, and where the clip stops the gradient (PPO, arXiv:1707.06347, eq. 7; the
    upper clip apart from the lower: DAPO, arXiv:2503.14476, section 3.1). For A < 0, dual_clip c > 1 bounds the loss by -c·A
    (arXiv:1912.09729, eq. 5)."""
    ratio = log_ratio.exp()
    loss = -torch.minimum(
        ratio * advantages, ratio.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages
    )
    stopped = ((advantages > 0) & (ratio > 1 + eps_clip_high)) | (
        (advantages < 0) & (ratio < 1 - eps_clip)
    )
    if dual_clip is not None:
        stopped = stopped | ((advantages < 0) & (ratio > dual_clip))
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss, stopped


def gspo_log_ratio(log_ratio: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """The trajectory's length-normalised log-ratio at each of its tokens, with each token's own gradient (GSPO-token, arXiv:2507.18071, eq. 13-14):
    the value is the mean over the trajectory; clipped as in PPO, a whole trajectory is in or out. The paper averages over trajectories of token means
    (loss_aggregation: sequence_mean_token_mean) and clips at 3e-4 and 4e-4: long answers, nearly on policy. Stale tokens of short answers need PPO's."""
    mean = sequence_mean(log_ratio.detach(), sequence, sequences)[sequence]
    return mean + log_ratio - log_ratio.detach()


def cispo(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """-sg(clip(r, 1 - eps_clip, 1 + eps_clip_high))·A·log π per token: a clipped weight, and a gradient for every token (MiniMax-M1,
    arXiv:2506.13585, eq. 4-5, which sets no lower bound, here eps_clip = 1: a bound from below would lift the weight of tokens that the learner hardly
    gives any more). No gradient is stopped; the second value says whose weight is clipped."""
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - eps_clip, 1 + eps_clip_high)
    return -weight * advantages * logprobs, weight != ratio


def sapo(
    log_ratio: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float
) -> tuple[Tensor, Tensor]:
    """-σ(τ·(r - 1))·(4/τ)·A per token, τ by the sign of A: a soft gate in place of the clip; at r = 1 the gradient is the policy gradient's (SAPO,
    arXiv:2511.20347, eq. 5-6). Nothing is stopped."""
    tau = torch.where(advantages > 0, torch.full_like(advantages, tau_positive), tau_negative)
    return -torch.sigmoid(tau * (log_ratio.exp() - 1)) * 4 / tau * advantages, torch.zeros_like(
        advantages, dtype=torch.bool
    )


def dppo(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, threshold: float
) -> tuple[Tensor, Tensor]:
    """-r·A per token, stopped where the token's probability has moved more than the threshold away from the behaviour policy's, in the
    direction in which A pushes it (DPPO with the binary total variation, arXiv:2602.04879, section 4)."""
    moved = logprobs.detach().exp() - behaviour_logprobs.exp()
    stopped = ((advantages > 0) & (moved > threshold)) | ((advantages < 0) & (moved < -threshold))
    ratio = (logprobs - behaviour_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return torch.where(stopped, torch.zeros_like(ratio), -ratio * advantages), stopped


def reinforce(logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """-A·log π per token (Williams 1992). Off policy it needs a truncated weight. Nothing is stopped."""
    return -advantages * logprobs, torch.zeros_like(advantages, dtype=torch.bool)


def log_linear_proximal(logprobs: Tensor, behaviour_logprobs: Tensor, ages: Tensor) -> Tensor:
    """Log-probs [N] of the policy one version before the learner's, on the line from the behaviour policy (`ages` versions before) to it:
    log μ + (age - 1)/age · (log π - log μ), and log π itself at age 0 (A-3PO, arXiv:2512.06547, section 3)."""
    share = torch.where(ages > 0, (ages - 1) / ages.clamp(min=1), torch.ones_like(ages))
    return behaviour_logprobs + share * (logprobs.detach() - behaviour_logprobs)


def policy_loss(
    tokens: PolicyTokens,
    algorithm: AlgorithmConfig,
    entropy: Tensor | None = None,
    mean_weight: float = 1.0,
) -> tuple[Tensor, LossSums]:
    """Loss of one micro-batch: sum over tokens of weight · mask · truncated(π_old / π_behaviour) · surrogate(π_learner / π_old), less
    entropy_coef · weight · entropy, if the entropies [N] are given, plus kl_loss_coef · weight · capped ratio · KL estimate, if the reference's
    log-probs are there, plus value_coef · `value_loss`, if the values are.

    π_old is the behaviour policy itself (its truncated weight is then 1: the surrogate's ratio carries the whole correction); the learner's policy
    before this step, which is the learner's policy now, since a batch gets one step (decoupled PPO, arXiv:2505.24298, eq. 5, with the recomputed
    proximal policy); or the log-linear guess at the version before.

    Args:
        mean_weight: the truncated weights are divided by it: their mean over the step's tokens, from `truncated_weights`, normalises them.

    Returns:
        The loss (with gradient) and detached sums for metrics.
    """
    logprobs, behaviour, advantages = tokens.logprobs, tokens.behaviour_logprobs, tokens.advantages
    if (
        not logprobs.shape
        == behaviour.shape
        == advantages.shape
        == tokens.weights.shape
        == tokens.sequence.shape
    ):
        raise ValueError(
            f"log-probs {tuple(logprobs.shape)}, behaviour {tuple(behaviour.shape)}, advantages {tuple(advantages.shape)} must have one shape"
        )
    old = _old_logprobs(tokens, algorithm.old_policy)
    log_ratio = (logprobs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    surrogate, clipped, own = _surrogate(tokens, old, log_ratio, algorithm)
    raw = (logprobs - behaviour).detach()
    uncut = _importance_weights(tokens, algorithm)
    cap = algorithm.correction.cap
    weight = uncut.clamp(max=cap) / mean_weight
    masks = _masks(raw, tokens, algorithm.correction)
    kept = ~torch.stack(list(masks.values())).any(0)
    loss = (
        tokens.weights * torch.where(kept, weight * surrogate, torch.zeros_like(surrogate))
    ).sum()
    if entropy is not None and algorithm.entropy_coef:
        loss = loss - algorithm.entropy_coef * (tokens.weights * entropy).sum()
    kl = torch.zeros_like(raw)
    if tokens.reference_logprobs is not None:
        kl = kl_estimate(tokens.reference_logprobs - logprobs, algorithm.kl_estimator)
        loss = (
            loss
            + algorithm.kl_loss_coef
            * (tokens.weights * _expectation_weight(logprobs - behaviour, algorithm) * kl).sum()
        )
    of_values = loss.new_zeros(())
    if tokens.values is not None and tokens.returns is not None:
        of_values = algorithm.value_coef * value_loss(tokens.values, tokens.returns, tokens.weights)
        loss = loss + of_values
    with torch.no_grad():
        full = raw.double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratio = full.exp()
        late = (tokens.ages == 0) & (
            sequence_max(tokens.ages, tokens.sequence, tokens.sequences)[tokens.sequence] > 0
        )
        sums = LossSums(
            loss=loss.detach(),
            ratio=ratio.sum(),
            ratio_squared=ratio.square().sum(),
            ratio_max=ratio.max() if ratio.numel() else ratio.new_zeros(()),
            clipped=clipped.sum(),
            weight=weight.sum(),
            masked=(~kept).sum(),
            **{f"masked_{reason}": mask.sum() for reason, mask in masks.items()},
            capped=(uncut > cap).sum(),
            kl_k1=kl_estimate(full, "k1").sum(),
            kl_k3=kl_estimate(full, "k3").sum(),
            kl_reference=kl.detach().sum(),
            value_loss=of_values.detach(),
            drift=full.abs()[late].sum(),
            drift_tokens=late.sum(),
            nonfinite=(~torch.isfinite(raw)).sum(),
            own=own,
        )
    return loss, sums


def _expectation_weight(log_ratio: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """min(π_learner / π_behaviour, correction.cap), with which a mean over the behaviour policy's tokens is one over the learner's own (DeepSeek-V3.2,
    arXiv:2512.02556, section 3.1, which does not cap it). It carries a gradient: the divergence's own gradient has a part by which tokens change
    their probability, and without it k3's would be that of KL(reference || learner). k2 is the exception: its gradient is right without that part,
    and its value is biased either way."""
    ratio = (
        log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=algorithm.correction.cap)
    )
    return ratio.detach() if algorithm.kl_estimator == "k2" else ratio


def truncated_weights(tokens: PolicyTokens, algorithm: AlgorithmConfig) -> Tensor:
    """Weights [N] for the way from the behaviour policy to the surrogate's old policy, at most correction.cap, without gradient."""
    return _importance_weights(tokens, algorithm).clamp(max=algorithm.correction.cap)


def _importance_weights(tokens: PolicyTokens, algorithm: AlgorithmConfig) -> Tensor:
    """The same before the cap; 1 without truncation."""
    if algorithm.correction.truncation == "none":
        return torch.ones_like(tokens.behaviour_logprobs)
    way = (_old_logprobs(tokens, algorithm.old_policy) - tokens.behaviour_logprobs).detach()
    return importance_weights(
        way, tokens.sequence, tokens.sequences, algorithm.correction.truncation
    )


def supervised_loss(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, LossSums]:
    """Negative log-likelihood of the target tokens [N], in nats, weighted [N]. The ratio metrics are those of an on-policy step."""
    loss = -(logprobs * weights).sum()
    with torch.no_grad():
        zero, count = logprobs.new_zeros(()), logprobs.new_ones(()) * logprobs.numel()
        nonfinite = (~torch.isfinite(logprobs)).sum()
        sums = LossSums(
            loss.detach(),
            count,
            count,
            logprobs.new_ones(()),
            clipped=zero,
            weight=count,
            nonfinite=nonfinite,
        )
    return loss, sums


def _old_logprobs(tokens: PolicyTokens, old_policy: str) -> Tensor:
    if old_policy == "behaviour":
        return tokens.behaviour_logprobs
    if old_policy == "learner":
        return tokens.logprobs.detach()
    return log_linear_proximal(tokens.logprobs, tokens.behaviour_logprobs, tokens.ages)


def _surrogate(
    tokens: PolicyTokens, old: Tensor, log_ratio: Tensor, algorithm: AlgorithmConfig
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss and clip of each token [N], and the sums of an own loss's metrics."""
    if not is_own(algorithm.loss):
        return *_built_in(tokens, log_ratio, algorithm), {}
    if not tokens.logprobs.numel():  # a stand-in micro-batch, which an own loss need not understand
        return tokens.logprobs, torch.zeros_like(tokens.logprobs, dtype=torch.bool), {}
    told: dict[str, Tensor | int] = {
        "logprobs": tokens.logprobs,
        "old_logprobs": old,
        "behaviour_logprobs": tokens.behaviour_logprobs,
        "advantages": tokens.advantages,
        "ages": tokens.ages,
        "sequence": tokens.sequence,
        "sequences": tokens.sequences,
    }
    return own_loss(algorithm.loss, told)


def _built_in(
    tokens: PolicyTokens, log_ratio: Tensor, algorithm: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    low, high, advantages = algorithm.clip_low, algorithm.eps_clip_high, tokens.advantages
    match algorithm.loss:
        case "gspo":
            return ppo_clip(
                gspo_log_ratio(log_ratio, tokens.sequence, tokens.sequences), advantages, low, high
            )
        case "cispo":
            return cispo(tokens.logprobs, log_ratio, advantages, low, high)
        case "sapo":
            return sapo(log_ratio, advantages, algorithm.tau_positive, algorithm.tau_negative)
        case "dppo":
            return dppo(
                tokens.logprobs, tokens.behaviour_logprobs, advantages, algorithm.dppo_threshold
            )
        case "reinforce":
            return reinforce(tokens.logprobs, advantages)
        case _:
            return ppo_clip(log_ratio, advantages, low, high, algorithm.dual_clip)


def made_up_tokens() -> PolicyTokens:
    """Twelve tokens of three trajectories, ratios on both sides of 1 and advantages of both signs: what a loss is tried on."""
    behaviour = torch.linspace(-3.0, -0.1, 12)
    logprobs = (behaviour + torch.linspace(-0.6, 0.09, 12)).requires_grad_()
    sequence = torch.arange(3).repeat_interleave(4)
    advantages = torch.tensor([1.0, -0.5, -0.5])[sequence]
    return PolicyTokens(
        logprobs,
        behaviour,
        advantages,
        torch.full((12,), 1 / 12),
        sequence,
        3,
        (2 - sequence).float(),
    )


def own_metrics(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """Names of an own loss's metrics, from a call on made-up numbers; none for a built-in one.

    Raises:
        FunctionError: it raised, broke its contract, or its gradient is no number or 0 everywhere.
    """
    if not is_own(algorithm.loss):
        return ()
    tokens = made_up_tokens()
    surrogate, _, own = _surrogate(
        tokens, tokens.behaviour_logprobs, tokens.logprobs - tokens.behaviour_logprobs, algorithm
    )
    (gradient,) = torch.autograd.grad(surrogate.sum(), tokens.logprobs, allow_unused=True)
    if gradient is None or not torch.isfinite(gradient).all() or not gradient.any():
        found = (
            "does not depend on logprobs"
            if gradient is None
            else f"has the gradient {gradient.tolist()}"
        )
        name = f"algorithm.loss = {algorithm.loss!r} ({where(import_function('algorithm.loss =', algorithm.loss))})"
        raise FunctionError(
            f"{name} {found} on made-up numbers; compute the loss from logprobs, with finite steps"
        )
    return tuple(own)


def _masks(
    log_ratio: Tensor, tokens: PolicyTokens, correction: CorrectionConfig
) -> dict[str, Tensor]:
    """Which tokens each correction masks [N], judged by the whole way from the behaviour policy to the learner."""
    sequence, sequences = tokens.sequence, tokens.sequences
    none = torch.zeros_like(log_ratio, dtype=torch.bool)
    masks = {"band": none, "rejected": none, "sequence": none}
    if correction.mask_below is not None or correction.mask_above is not None:
        masks["band"] = ~band_mask(
            log_ratio, correction.mask_below or 0.0, correction.mask_above or float("inf")
        )
    if correction.reject_above is not None:
        masks["rejected"] = ~rejection_mask(
            log_ratio,
            sequence,
            sequences,
            correction.reject_estimator,
            correction.reject_level,
            correction.reject_above,
        )
    if correction.sequence_mask_above is not None:
        masks["sequence"] = ~off_policy_sequence_mask(
            log_ratio, tokens.advantages, sequence, sequences, correction.sequence_mask_above
        )
    return masks
