"""The settings of a policy objective and of a preference objective, as plain values. This module
imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.algorithms.kl import KLEstimator

__all__ = [
    "CorrectionSpec",
    "Level",
    "ObjectiveSpec",
    "PreferenceLoss",
    "PreferenceSpec",
    "RewardModelSpec",
    "Truncation",
    "VespoSpec",
]

Level = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]
"""What `reject_above` judges: one token, or a trajectory by its sum, mean or largest value."""

Truncation = Literal["none", "token", "sequence", "geometric"]
"""How a truncated importance weight is computed."""

PreferenceLoss = Literal["sigmoid", "ipo", "hinge", "simpo", "kto"]


@dataclass(frozen=True, slots=True)
class CorrectionSpec:
    """How the objective corrects for tokens that another policy sampled."""

    truncation: Truncation = "none"
    cap: float = 2.0
    """Largest importance weight."""
    floor: float = 0.0
    """Smallest importance weight."""
    mask_below: float | None = None
    mask_above: float | None = None
    """Tokens with a ratio outside [mask_below, mask_above] are masked."""
    reject_above: float | None = None
    """In nats."""
    reject_estimator: Literal["k1", "k2", "k3"] = "k3"
    reject_level: Level = "token"
    sequence_mask_above: float | None = None
    """In nats."""


@dataclass(frozen=True, slots=True)
class VespoSpec:
    """The shape of VESPO's weight W^k · exp(λ·(1 - W)), by the sign of the advantage."""

    k_positive: float
    lambda_positive: float
    k_negative: float
    lambda_negative: float


@dataclass(frozen=True, slots=True)
class ObjectiveSpec:
    """Which surrogate the objective uses, and which terms it adds. The settings reference explains
    each value under `algorithm`."""

    loss: str
    """A built-in loss, or a function as `package.module:function`."""
    old_policy: Literal["behavior", "learner", "log_linear"]
    clip_low: float
    clip_high: float
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: float | None
    tau_positive: float
    tau_negative: float
    dppo_threshold: float
    vespo: VespoSpec
    kl_cov_coef: float
    entropy_coef: float
    kl_loss_coef: float
    kl_estimator: KLEstimator
    value_coef: float
    correction: CorrectionSpec


@dataclass(frozen=True, slots=True)
class PreferenceSpec:
    """Which loss of preferences a step uses. `algorithms.preference` has the formulas."""

    loss: PreferenceLoss = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    """Assumed share of pairs with swapped sides, of sigmoid and simpo."""
    length_normalized: bool = False
    """Whether sigmoid and hinge use means over tokens instead of sums."""
    simpo_margin: float = 0.5
    """SimPO's gamma, in units of the logit."""
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    """KTO's weights of the two labels."""
    ce_coef: float = 0.0
    """Weight of the next-token loss on chosen sides, a mean over all their tokens of the step
    (compare RPO, arXiv:2404.19733, which divides by each side's length)."""
    weight_cap: float | None = None
    """Largest off-policy weight of a pair; None = no weights."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a reference policy."""
        return self.loss != "simpo"

    @property
    def uses_means(self) -> bool:
        """Whether a completion's score is a mean over its tokens, not a sum."""
        normalized = self.length_normalized and self.loss in ("sigmoid", "hinge")
        return normalized or self.loss in ("ipo", "simpo")


@dataclass(frozen=True, slots=True)
class RewardModelSpec:
    """The loss of a reward model. `algorithms.reward_model` has the formula."""

    center_coef: float = 0.0
    """Weight of the squared sum of both scores of a pair."""
