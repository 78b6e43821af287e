"""The policy objective: a weighted sum over the loss tokens of one micro-batch.

Each token contributes its loss (`algorithms.losses`), times a truncated importance weight from the
behavior policy to the loss's old policy, times a mask. The token weights come from the whole step
(`token_weights`), so packing and ranks cannot change the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from asyncrl.algorithms.advantages import Advantage
from asyncrl.algorithms.advantages.gae import Gae
from asyncrl.algorithms.corrections import Correction
from asyncrl.algorithms.kl import LOG_RATIO_LIMIT, kl_estimate
from asyncrl.algorithms.loss_metrics import (
    LossSums,
    TokenTerms,
    drift_sums,
    ratio_sums,
    supervised_sums,
)
from asyncrl.algorithms.losses import Loss
from asyncrl.algorithms.losses.own_loss import OwnLoss
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.references import KlInLoss, KlTerm
from asyncrl.algorithms.values import value_loss
from asyncrl.runtime.functions import FunctionError, import_function, where


class Objective(Protocol):
    """The settings of the policy objective."""

    @property
    def loss(self) -> Loss: ...
    @property
    def advantage(self) -> Advantage: ...
    @property
    def correction(self) -> Correction: ...
    @property
    def kl(self) -> KlTerm | None: ...
    @property
    def entropy_coef(self) -> float: ...


def token_weights(
    lengths: Sequence[int],
    aggregation: Literal[
        "token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed"
    ],
    fixed_length: int,
) -> list[float]:
    """Return the weight of each loss token, one value for each trajectory.

    - token_mean: 1 / N (DAPO, arXiv:2503.14476, eq. 8).
    - sequence_mean_token_mean: 1 / (S · its length) (GRPO, arXiv:2402.03300, eq. 3).
    - sequence_mean_token_sum: 1 / S.
    - fixed: 1 / (S · fixed_length) (Dr.GRPO, arXiv:2503.20783, with the longest completion
      allowed).

    Args:
        lengths: loss tokens of each trajectory of the step. N is their sum. S is the number of
            trajectories with a loss token; a trajectory without one gets weight 0.
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


def policy_loss(
    tokens: PolicyTokens,
    objective: Objective,
    entropy: Tensor | None = None,
    mean_weight: float = 1.0,
) -> tuple[Tensor, LossSums]:
    """Compute the loss of one micro-batch.

    The loss is the sum over tokens of weight · mask · truncated(π_old / π_behavior) ·
    loss(π_learner / π_old). These terms are added where their inputs are given:
    -entropy_coef · weight · entropy; kl_loss_coef · weight · capped ratio · KL estimate;
    value_coef · `value_loss`.

    π_old is one of three policies (`PolicyTokens.old_logprobs`). With `behavior`, the loss's ratio
    is the whole correction, and the truncated weight is 1. With `learner`, it is that of decoupled
    PPO (arXiv:2505.24298, eq. 5).

    Args:
        entropy: [N], with gradient.
        mean_weight: divides the truncated weights, to normalize them over the whole step.

    Returns:
        The loss (with gradient) and detached sums for metrics.
    """
    _check_shapes(tokens)
    terms = objective.loss.terms(tokens, tokens.log_ratio(objective.loss.old_policy))
    weight, changed = _capped_weights(tokens, objective)
    weight = weight / mean_weight
    masks = objective.correction.masks(tokens)
    kept = ~torch.stack(list(masks.values())).any(0)
    policy_term = torch.where(kept, weight * terms.loss, torch.zeros_like(terms.loss))
    loss = (tokens.weights * policy_term).sum()
    if entropy is not None and objective.entropy_coef:
        loss = loss - objective.entropy_coef * (tokens.weights * entropy).sum()
    kl_term, kl_sum = _kl_term(tokens, objective.kl)
    value_term = _value_term(tokens, objective.advantage)
    loss = loss + kl_term + value_term
    with torch.no_grad():
        log_ratio = tokens.logprobs - tokens.behavior_logprobs
        sums = LossSums(
            loss=loss.detach(),
            clipped=terms.stopped.sum(),
            weight=weight.sum(),
            masked=(~kept).sum(),
            capped=changed.sum(),
            kl_reference=kl_sum,
            value_loss=value_term.detach(),
            own=terms.metrics,
            parts={},
            tokens=TokenTerms(tokens.logprobs.detach(), weight, terms.stopped, ~kept),
            **{f"masked_{reason}": mask.sum() for reason, mask in masks.items()},
            **ratio_sums(log_ratio),
            **drift_sums(log_ratio, tokens.ages, tokens.sequence, tokens.sequences),
        )
    return loss, sums


def supervised_loss(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, LossSums]:
    """Compute the weighted negative log-likelihood of the target tokens, in nats: the component
    `ce` of a loss. Both arguments have shape [N]. A token with weight 0 is no target."""
    loss = -(logprobs * weights).sum()
    with torch.no_grad():
        return loss, supervised_sums(loss, logprobs, {"ce/loss": loss.detach()})


def truncated_weights(tokens: PolicyTokens, objective: Objective) -> Tensor:
    """Return the importance weights [N] from the behavior policy to the loss's old policy, between
    floor and cap, without gradient."""
    return _capped_weights(tokens, objective)[0]


def own_metrics(loss: Loss) -> tuple[str, ...]:
    """Return the names of the metrics of the user's loss, from one call on trial tokens. A built-in
    loss has none.

    Raises:
        FunctionError: the function raised or broke its contract, or its gradient is not finite or
            is 0 everywhere.
    """
    if not isinstance(loss, OwnLoss):
        return ()
    tokens = trial_tokens()
    terms = loss.terms(tokens, tokens.log_ratio(loss.old_policy))
    (gradient,) = torch.autograd.grad(terms.loss.sum(), tokens.logprobs, allow_unused=True)
    if gradient is None or not torch.isfinite(gradient).all() or not gradient.any():
        found = (
            "does not depend on logprobs"
            if gradient is None
            else f"has the gradient {gradient.tolist()}"
        )
        defined = where(import_function("algorithm.loss =", loss.name))
        raise FunctionError(
            f"algorithm.loss = {loss.name!r} ({defined}) {found} on trial tokens; compute the loss"
            " from logprobs, with finite steps"
        )
    return tuple(terms.metrics)


def trial_tokens() -> PolicyTokens:
    """Return twelve tokens of three trajectories to try a loss on. Their ratios lie on both sides
    of 1, and their advantages have both signs."""
    behavior = torch.linspace(-3.0, -0.1, 12)
    logprobs = (behavior + torch.linspace(-0.6, 0.09, 12)).requires_grad_()
    sequence = torch.arange(3).repeat_interleave(4)
    return PolicyTokens(
        logprobs,
        behavior,
        advantages=torch.tensor([1.0, -0.5, -0.5])[sequence],
        weights=torch.full((12,), 1 / 12),
        sequence=sequence,
        sequences=3,
        ages=(2 - sequence).float(),
    )


def _check_shapes(tokens: PolicyTokens) -> None:
    shape = tokens.logprobs.shape
    for name in ("behavior_logprobs", "advantages", "weights", "sequence"):
        found = getattr(tokens, name).shape
        if found != shape:
            raise ValueError(
                f"{name} have shape {tuple(found)} and logprobs {tuple(shape)}; all must have one"
                " shape"
            )


def _capped_weights(tokens: PolicyTokens, objective: Objective) -> tuple[Tensor, Tensor]:
    """The importance weights [N] between floor and cap, and where those changed them."""
    truncation = objective.correction.truncation
    if truncation is None:
        ones = torch.ones_like(tokens.behavior_logprobs)
        return ones, torch.zeros_like(ones, dtype=torch.bool)
    weights = truncation.weights(tokens, objective.loss.old_policy)
    floor, cap = truncation.floor, truncation.cap
    return weights.clamp(floor, cap), (weights > cap) | (weights < floor)


def _kl_term(tokens: PolicyTokens, kl: KlTerm | None) -> tuple[Tensor, Tensor]:
    """The term of KL(learner || reference) in the loss, and the sum of its estimates. Both are 0
    without reference log-probs."""
    zero = tokens.logprobs.new_zeros(())
    if tokens.reference_logprobs is None:
        return zero, zero
    estimator = "k3" if kl is None else kl.estimator
    values = kl_estimate(tokens.reference_logprobs - tokens.logprobs, estimator)
    if not isinstance(kl, KlInLoss):
        return zero, values.detach().sum()
    weighted = tokens.weights * _kl_weight(tokens, kl) * values
    return kl.kl_loss_coef * weighted.sum(), values.detach().sum()


def _value_term(tokens: PolicyTokens, advantage: Advantage) -> Tensor:
    """The term of the value head in the loss: 0 without one."""
    if tokens.values is None or tokens.returns is None or not isinstance(advantage, Gae):
        return tokens.logprobs.new_zeros(())
    return advantage.value_coef * value_loss(tokens.values, tokens.returns, tokens.weights)


def _kl_weight(tokens: PolicyTokens, kl: KlInLoss) -> Tensor:
    """min(π_learner / π_behavior, cap), which turns a mean over the behavior policy's tokens into
    one over the learner's. Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1, without a cap.

    The weight carries a gradient: part of the divergence's gradient comes from tokens that change
    their probability. Without that part, k3 has the gradient of KL(reference || learner). k2 is the
    exception. Its gradient is right without that part, and its value is biased either way.
    """
    log_ratio = tokens.logprobs - tokens.behavior_logprobs
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    capped = ratio.clamp(max=kl.cap)
    return capped.detach() if kl.estimator == "k2" else capped
