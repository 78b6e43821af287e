"""The policy objective: a weighted sum over the loss tokens of one micro-batch.

Each token contributes a surrogate, times a truncated importance weight from the behavior policy to
the surrogate's old policy, times a mask. The token weights come from the whole step
(`token_weights`), so packing and ranks cannot change the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
)
from asyncrl.algorithms.loss_metrics import LossSums, drift_sums, ratio_sums, supervised_sums
from asyncrl.algorithms.objective_spec import CorrectionSpec, ObjectiveSpec
from asyncrl.algorithms.own import is_own, own_loss
from asyncrl.algorithms.surrogates import (
    cispo,
    clip_cov,
    dppo,
    gmpo,
    gspo_log_ratio,
    kl_cov,
    log_linear_proximal,
    ppo_clip,
    reinforce,
    sapo,
    vespo,
)
from asyncrl.algorithms.values import value_loss
from asyncrl.runtime.functions import FunctionError, import_function, where

__all__ = [
    "PolicyTokens",
    "clipped_tokens",
    "own_metrics",
    "policy_loss",
    "supervised_loss",
    "token_weights",
    "trial_tokens",
    "truncated_weights",
]


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """The N loss tokens of `sequences` trajectories, as the learner now evaluates them. Log-probs
    are in nats."""

    logprobs: Tensor
    """[N], with gradient."""
    behavior_logprobs: Tensor
    """[N], from the engine that sampled."""
    advantages: Tensor
    """[N]."""
    weights: Tensor
    """[N], of the step's loss: see `token_weights`."""
    sequence: Tensor
    """[N] int64: the trajectory of each token."""
    sequences: int
    ages: Tensor
    """[N] float: learner's version minus the version that sampled the token."""
    reference_logprobs: Tensor | None = None
    """[N], of the frozen reference policy."""
    values: Tensor | None = None
    """[N], of the value head, with gradient."""
    returns: Tensor | None = None
    """[N], the targets of the values."""
    selected: Tensor | None = None
    """[N] bool: the tokens that clip_cov and kl_cov treat differently. None = no token."""


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
    objective: ObjectiveSpec,
    entropy: Tensor | None = None,
    mean_weight: float = 1.0,
) -> tuple[Tensor, LossSums]:
    """Compute the loss of one micro-batch.

    The loss is the sum over tokens of weight · mask · truncated(π_old / π_behavior) ·
    surrogate(π_learner / π_old). These terms are added where their inputs are given:
    -entropy_coef · weight · entropy; kl_loss_coef · weight · capped ratio · KL estimate;
    value_coef · `value_loss`.

    π_old is one of three policies. `behavior`: the surrogate's ratio is the whole correction, and
    the truncated weight is 1. `learner`: the policy before this step, which is the current one,
    because each batch gets one step (decoupled PPO, arXiv:2505.24298, eq. 5). `log_linear`: the
    estimate of `log_linear_proximal`.

    Args:
        entropy: [N], with gradient.
        mean_weight: divides the truncated weights, to normalize them over the whole step.

    Returns:
        The loss (with gradient) and detached sums for metrics.
    """
    _check_shapes(tokens)
    correction = objective.correction
    log_ratio = (tokens.logprobs - tokens.behavior_logprobs).detach()
    surrogate, clipped, own = _surrogate(tokens, objective)
    uncapped = _importance_weights(tokens, objective)
    weight = uncapped.clamp(correction.floor, correction.cap) / mean_weight
    masks = _masks(log_ratio, tokens, correction)
    kept = ~torch.stack(list(masks.values())).any(0)
    policy_term = torch.where(kept, weight * surrogate, torch.zeros_like(surrogate))
    loss = (tokens.weights * policy_term).sum()
    if entropy is not None and objective.entropy_coef:
        loss = loss - objective.entropy_coef * (tokens.weights * entropy).sum()
    kl_term, kl_sum = _kl_term(tokens, objective)
    value_term = _value_term(tokens, objective)
    loss = loss + kl_term + value_term
    with torch.no_grad():
        sums = LossSums(
            loss=loss.detach(),
            clipped=clipped.sum(),
            weight=weight.sum(),
            masked=(~kept).sum(),
            capped=((uncapped > correction.cap) | (uncapped < correction.floor)).sum(),
            kl_reference=kl_sum,
            value_loss=value_term.detach(),
            own=own,
            parts={},
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


def truncated_weights(tokens: PolicyTokens, objective: ObjectiveSpec) -> Tensor:
    """Return the importance weights [N] from the behavior policy to the surrogate's old policy,
    between `correction.floor` and `correction.cap`, without gradient."""
    correction = objective.correction
    return _importance_weights(tokens, objective).clamp(correction.floor, correction.cap)


def clipped_tokens(tokens: PolicyTokens, objective: ObjectiveSpec) -> Tensor:
    """Return [N] bool: the tokens whose gradient the surrogate's own clip stops."""
    return _surrogate(tokens, objective)[1]


def own_metrics(loss: str) -> tuple[str, ...]:
    """Return the names of a custom loss's metrics, from one call on trial tokens. A built-in loss
    has none.

    Raises:
        FunctionError: the function raised or broke its contract, or its gradient is not finite or
            is 0 everywhere.
    """
    if not is_own(loss):
        return ()
    tokens = trial_tokens()
    surrogate, _, own = _own_surrogate(tokens, tokens.behavior_logprobs, loss)
    (gradient,) = torch.autograd.grad(surrogate.sum(), tokens.logprobs, allow_unused=True)
    if gradient is None or not torch.isfinite(gradient).all() or not gradient.any():
        found = (
            "does not depend on logprobs"
            if gradient is None
            else f"has the gradient {gradient.tolist()}"
        )
        place = where(import_function("algorithm.loss =", loss))
        raise FunctionError(
            f"algorithm.loss = {loss!r} ({place}) {found} on trial tokens; compute the loss from"
            " logprobs, with finite steps"
        )
    return tuple(own)


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


def _surrogate(
    tokens: PolicyTokens, objective: ObjectiveSpec
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss [N] and clip mask [N] of the tokens, and the sums of a custom loss's metrics."""
    old = _old_logprobs(tokens, objective.old_policy)
    if not is_own(objective.loss):
        return *_built_in_surrogate(tokens, old, objective), {}
    if not tokens.logprobs.numel():  # a custom loss need not handle a stand-in micro-batch
        return tokens.logprobs, torch.zeros_like(tokens.logprobs, dtype=torch.bool), {}
    return _own_surrogate(tokens, old, objective.loss)


def _own_surrogate(
    tokens: PolicyTokens, old: Tensor, function: str
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    arguments: dict[str, Tensor | int] = {
        "logprobs": tokens.logprobs,
        "old_logprobs": old,
        "behavior_logprobs": tokens.behavior_logprobs,
        "advantages": tokens.advantages,
        "ages": tokens.ages,
        "sequence": tokens.sequence,
        "sequences": tokens.sequences,
    }
    return own_loss(function, arguments)


def _built_in_surrogate(
    tokens: PolicyTokens, old: Tensor, objective: ObjectiveSpec
) -> tuple[Tensor, Tensor]:
    logprobs, advantages = tokens.logprobs, tokens.advantages
    log_ratio = (logprobs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    low, high = objective.clip_low, objective.clip_high
    sequence, sequences = tokens.sequence, tokens.sequences
    match objective.loss:
        case "ppo":
            return ppo_clip(log_ratio, advantages, low, high, objective.dual_clip)
        case "gspo":
            of_sequence = gspo_log_ratio(log_ratio, sequence, sequences)
            return ppo_clip(of_sequence, advantages, low, high)
        case "gmpo":
            return gmpo(log_ratio, advantages, sequence, sequences, low, high)
        case "cispo":
            return cispo(logprobs, log_ratio, advantages, low, high)
        case "sapo":
            return sapo(log_ratio, advantages, objective.tau_positive, objective.tau_negative)
        case "dppo":
            return dppo(logprobs, tokens.behavior_logprobs, advantages, objective.dppo_threshold)
        case "vespo":
            return vespo(logprobs, log_ratio, advantages, sequence, sequences, objective.vespo)
        case "clip_cov":
            return clip_cov(log_ratio, advantages, _selected(tokens), low, high)
        case "kl_cov":
            return kl_cov(log_ratio, advantages, _selected(tokens), objective.kl_cov_coef)
        case "reinforce":
            return reinforce(logprobs, advantages)
    raise ValueError(f"no loss is called {objective.loss!r}")


def _selected(tokens: PolicyTokens) -> Tensor:
    none = torch.zeros_like(tokens.advantages, dtype=torch.bool)
    return none if tokens.selected is None else tokens.selected


def _old_logprobs(tokens: PolicyTokens, old_policy: str) -> Tensor:
    if old_policy == "behavior":
        return tokens.behavior_logprobs
    if old_policy == "learner":
        return tokens.logprobs.detach()
    return log_linear_proximal(tokens.logprobs, tokens.behavior_logprobs, tokens.ages)


def _importance_weights(tokens: PolicyTokens, objective: ObjectiveSpec) -> Tensor:
    """The importance weights [N] before the cap: 1 without truncation."""
    truncation = objective.correction.truncation
    if truncation == "none":
        return torch.ones_like(tokens.behavior_logprobs)
    old = _old_logprobs(tokens, objective.old_policy)
    log_weight = (old - tokens.behavior_logprobs).detach()
    return importance_weights(log_weight, tokens.sequence, tokens.sequences, truncation)


def _kl_term(tokens: PolicyTokens, objective: ObjectiveSpec) -> tuple[Tensor, Tensor]:
    """The term of KL(learner || reference) in the loss, and the sum of its estimates. Both are 0
    without reference log-probs."""
    zero = tokens.logprobs.new_zeros(())
    if tokens.reference_logprobs is None:
        return zero, zero
    kl = kl_estimate(tokens.reference_logprobs - tokens.logprobs, objective.kl_estimator)
    weighted = tokens.weights * _kl_weight(tokens, objective) * kl
    return objective.kl_loss_coef * weighted.sum(), kl.detach().sum()


def _value_term(tokens: PolicyTokens, objective: ObjectiveSpec) -> Tensor:
    """The term of the value head in the loss: 0 without one."""
    if tokens.values is None or tokens.returns is None:
        return tokens.logprobs.new_zeros(())
    return objective.value_coef * value_loss(tokens.values, tokens.returns, tokens.weights)


def _kl_weight(tokens: PolicyTokens, objective: ObjectiveSpec) -> Tensor:
    """min(π_learner / π_behavior, correction.cap), which turns a mean over the behavior policy's
    tokens into one over the learner's. Source: DeepSeek-V3.2, arXiv:2512.02556, section 3.1,
    without a cap.

    The weight carries a gradient: part of the divergence's gradient comes from tokens that change
    their probability. Without that part, k3 has the gradient of KL(reference || learner). k2 is the
    exception. Its gradient is right without that part, and its value is biased either way.
    """
    log_ratio = tokens.logprobs - tokens.behavior_logprobs
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    capped = ratio.clamp(max=objective.correction.cap)
    return capped.detach() if objective.kl_estimator == "k2" else capped


def _masks(
    log_ratio: Tensor, tokens: PolicyTokens, correction: CorrectionSpec
) -> dict[str, Tensor]:
    """The tokens [N] that each correction masks, by the log-ratio of learner to behavior policy."""
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
