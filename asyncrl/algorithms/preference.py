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
from torch.nn.functional import logsigmoid

from asyncrl.algorithms.kl import LOG_RATIO_LIMIT
from asyncrl.algorithms.objective_spec import PreferenceSpec

__all__ = [
    "Completions",
    "Preferred",
    "kto_baseline",
    "kto_loss",
    "off_policy_weights",
    "pair_loss",
    "scores",
]


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
    """[B] sums by the policy that sampled them."""

    def at(self, index: Tensor) -> Completions:
        """Return the completions at these places: an index or a mask."""
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


def scores(completions: Completions, spec: PreferenceSpec) -> Tensor:
    """Return the scores [B] with gradient, as the loss uses them.

    Raises:
        ValueError: the loss needs the reference policy's log-probs, which are missing.
    """
    score = completions.logprobs.double()
    if spec.has_reference:
        if completions.reference is None:
            raise ValueError(
                f"loss {spec.loss!r} needs the reference policy's log-probs; add them to the rows,"
                " or use simpo"
            )
        score = score - completions.reference.double()
    return score / completions.tokens.double() if spec.uses_means else score


def pair_loss(chosen: Completions, rejected: Completions, spec: PreferenceSpec) -> Preferred:
    """Compute the loss of B pairs. d is the chosen side's score minus the rejected side's.

    - sigmoid: -log σ(beta·d) (DPO, arXiv:2305.18290, eq. 7). With label smoothing e, the labels are
      swapped with probability e: -(1 - e)·log σ(beta·d) - e·log σ(-beta·d) (conservative DPO,
      Mitchell 2023).
    - ipo: (d - 1 / (2·beta))² (arXiv:2310.12036, eq. 17), with means over tokens. Its authors
      confirmed that, and TRL's `ipo` is the same. With sums, the loss would grow with length.
    - hinge: max(0, 1 - beta·d) (SLiC, arXiv:2305.10425, here on log-ratios to the reference as in
      RSO, arXiv:2309.06657).
    - simpo: -log σ(beta·d - margin), with means and without a reference (arXiv:2405.14734, eq. 6).

    With `weight_cap`, the loss of a pair is multiplied by its `off_policy_weights`.

    Raises:
        ValueError: the loss takes no pairs, or log-probs that it needs are missing.
    """
    chosen_score, rejected_score = scores(chosen, spec), scores(rejected, spec)
    difference = chosen_score - rejected_score
    logit = spec.beta * difference
    match spec.loss:
        case "sigmoid":
            loss = _smoothed(logit, spec.label_smoothing)
        case "simpo":
            loss = _smoothed(logit - spec.simpo_margin, spec.label_smoothing)
        case "hinge":
            loss = (1 - logit).clamp(min=0)
        case "ipo":
            loss = (difference - 1 / (2 * spec.beta)).square()
        case _:
            raise ValueError(f"loss {spec.loss!r} takes single completions, not pairs")
    weights, capped = off_policy_weights(chosen, rejected, spec.weight_cap)
    rewards = (spec.beta * chosen_score).detach(), (spec.beta * rejected_score).detach()
    return Preferred(weights * loss, rewards, weights, capped)


def kto_loss(
    completions: Completions, desirable: Tensor, baseline: Tensor | float, spec: PreferenceSpec
) -> Preferred:
    """Compute the loss of B single completions: w·(1 - σ(±(reward - beta·baseline))), with plus and
    `desirable_weight` for desirable ones, and minus and `undesirable_weight` for the others (KTO,
    arXiv:2402.01306, section 4.1).

    Args:
        desirable: [B] bool.
        baseline: see `kto_baseline`; without gradient.
    """
    reward = spec.beta * scores(completions, spec)
    gain = reward - spec.beta * baseline
    weight = torch.where(
        desirable,
        reward.new_tensor(spec.desirable_weight),
        reward.new_tensor(spec.undesirable_weight),
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


def _smoothed(logit: Tensor, smoothing: float) -> Tensor:
    """The logistic loss [B] of labels that are swapped with this probability."""
    loss = -logsigmoid(logit)
    return loss if not smoothing else (1 - smoothing) * loss - smoothing * logsigmoid(-logit)
