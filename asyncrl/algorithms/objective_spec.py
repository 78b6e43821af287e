"""The settings of a policy objective, as plain values. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.algorithms.kl import KLEstimator

__all__ = ["CorrectionSpec", "Level", "ObjectiveSpec"]

Level = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]
"""What `reject_above` judges: one token, or a trajectory by its sum, mean or largest value."""


@dataclass(frozen=True, slots=True)
class CorrectionSpec:
    """How the objective corrects for tokens that another policy sampled."""

    truncation: Literal["none", "token", "sequence"] = "none"
    cap: float = 2.0
    """Largest importance weight."""
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
    entropy_coef: float
    kl_loss_coef: float
    kl_estimator: KLEstimator
    value_coef: float
    correction: CorrectionSpec
