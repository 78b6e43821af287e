"""Preference losses: pure functions of the summed log-probs of completions, in nats.

A score is a completion's log-ratio of learner to reference policy: log π_learner - log π_reference,
summed over its tokens. Some losses use the mean over its tokens instead. Without a reference, the
score is that of log π_learner alone. A reward is beta times a score, so it has the loss's own
normalization. Everything is computed in float64, because a sum over a long completion is large.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncrl.algorithms.kl import LOG_RATIO_LIMIT
from asyncrl.algorithms.preference_losses import Kto, PairLoss


@dataclass(frozen=True, slots=True)
class Completions:
    """B completions: one side of B pairs, or the completions of unpaired rows. The sums are over
    the tokens of a completion's mask."""

    logprobs: Tensor
    """[B] sums by the learner, with gradient."""
    tokens: Tensor
    """[B] number of tokens, above 0."""
    reference: Tensor | None = None
    """[B] sums by the reference policy."""
    behavior: Tensor | None = None
    """[B] sums by the policy that sampled the completions."""

    def at(self, index: Tensor) -> Completions:
        """Return the completions at these indices, or with True in this mask."""
        return Completions(
            self.logprobs[index],
            self.tokens[index],
            None if self.reference is None else self.reference[index],
            None if self.behavior is None else self.behavior[index],
        )


@dataclass(frozen=True, slots=True)
class Preferred:
    """The loss of B pairs or unpaired completions, and what is reported of them. Only `loss` has a
    gradient."""

    loss: Tensor
    """[B], with the off-policy weight."""
    rewards: tuple[Tensor, ...]
    """[B] each: of the chosen and the rejected side, or of the unpaired completion."""
    weights: Tensor
    """[B] off-policy weights, 1 without."""
    capped: Tensor
    """[B] bool: whether the cap reduced the weight."""


def scores(completions: Completions, loss: PairLoss | Kto) -> Tensor:
    """Return the scores [B] with gradient, as the loss uses them.

    Raises:
        ValueError: the loss needs the reference policy's log-probs, which are missing.
    """
    score = completions.logprobs.double()
    if loss.has_reference:
        if completions.reference is None:
            raise ValueError(
                f"loss {loss.name!r} needs the reference policy's log-probs; add them to the rows,"
                " or use simpo"
            )
        score = score - completions.reference.double()
    return score / completions.tokens.double() if loss.uses_means else score


def pair_loss(
    chosen: Completions, rejected: Completions, loss: PairLoss, weight_cap: float | None = None
) -> Preferred:
    """Compute the loss of B pairs, times their `off_policy_weights`.

    Raises:
        ValueError: log-probs that it needs are missing.
    """
    chosen_score, rejected_score = scores(chosen, loss), scores(rejected, loss)
    of_pairs = loss.of_pairs(chosen_score - rejected_score)
    weights, capped = off_policy_weights(chosen, rejected, weight_cap)
    rewards = (loss.beta * chosen_score).detach(), (loss.beta * rejected_score).detach()
    return Preferred(weights * of_pairs, rewards, weights, capped)


def kto_loss(
    completions: Completions, desirable: Tensor, baseline: Tensor | float, kto: Kto
) -> Preferred:
    """Compute the loss of B single completions: w·(1 - σ(±(reward - beta·baseline))), with plus and
    `desirable_weight` for desirable ones, and minus and `undesirable_weight` for the others (KTO,
    arXiv:2402.01306, section 4.1).

    Args:
        desirable: [B] bool.
        baseline: see `kto_baseline`; without gradient.
    """
    reward = kto.beta * scores(completions, kto)
    gain = reward - kto.beta * baseline
    weight = torch.where(
        desirable,
        reward.new_tensor(kto.desirable_weight),
        reward.new_tensor(kto.undesirable_weight),
    )
    loss = weight * (1 - torch.sigmoid(torch.where(desirable, gain, -gain)))
    ones = torch.ones_like(reward)
    return Preferred(loss, (reward.detach(),), ones, torch.zeros_like(ones, dtype=torch.bool))


def kto_baseline(log_ratio_sum: float, count: int) -> float:
    """Return KTO's estimate of KL(learner || reference), in nats: the mean log-ratio of `count`
    prompts with the completions of other prompts, at least 0 (arXiv:2402.01306, section 4.1)."""
    return max(log_ratio_sum / count, 0.0)  # in this order, NaN stays NaN


def off_policy_weights(
    chosen: Completions, rejected: Completions, cap: float | None
) -> tuple[Tensor, Tensor]:
    """Return the weights [B] of pairs that another policy sampled, without gradient, and where the
    cap reduced them [B] bool.

    A pair's importance weight is π_learner / π_behavior of both completions together:
    min(cap, exp(sum over both sides of log π_learner - log π_behavior)). A cap bounds its variance
    (truncated importance sampling, Ionides 2008). None as the cap: all weights are 1.

    Raises:
        ValueError: the behavior policy's log-probs are missing.
    """
    ones = torch.ones_like(chosen.logprobs, dtype=torch.float64)
    if cap is None:
        return ones, torch.zeros_like(ones, dtype=torch.bool)
    log_ratio = torch.zeros_like(ones)
    for side in (chosen, rejected):
        if side.behavior is None:
            raise ValueError(
                f"weight_cap = {cap:g} needs the behavior policy's log-probs; add them to the rows,"
                " or set no cap"
            )
        log_ratio = log_ratio + side.logprobs.detach().double() - side.behavior.double()
    weights = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return weights.clamp(max=cap), weights > cap
