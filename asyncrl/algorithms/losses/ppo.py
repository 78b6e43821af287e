"""PPO's clipped loss (arXiv:1707.06347)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from asyncrl.algorithms.losses.token_loss import ClippedLoss, Terms
from asyncrl.algorithms.policy_tokens import OldPolicy, PolicyTokens

if TYPE_CHECKING:
    from torch import Tensor

CLIPS = ("eps_clip", "eps_clip_high", "dual_clip")
"""Settings without an effect where the ratio is always 1."""


class ClipsUnlessOnPolicy(ClippedLoss):
    """A clipped loss that may also have the learner's policy as denominator, and then never
    clips."""

    old_policy: OldPolicy = "behavior"
    """Denominator of the loss's ratio. `behavior`: the policy that sampled. `learner`: the
    learner's policy at the step (the recomputed proximal policy of decoupled PPO,
    arXiv:2505.24298). `log_linear`: an estimate of the policy one version before (A-3PO).
    correction.truncation corrects from the behavior policy to the other two."""

    @property
    def clips(self) -> bool:
        return self.old_policy != "learner"

    @model_validator(mode="after")
    def clips_act(self) -> ClipsUnlessOnPolicy:
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name in CLIPS and value != field.default and not self.clips:
                raise ValueError(
                    f"{name} = {value:g} has no effect with old_policy: learner, whose ratio is"
                    " always 1; leave it out, or set old_policy: behavior"
                )
        return self


class Ppo(ClipsUnlessOnPolicy):
    """Clipped ratio of each token."""

    name: Literal["ppo"] = "ppo"
    dual_clip: float | None = Field(default=None, gt=1)
    """For negative advantages, bound the loss by this times the advantage. Must be above
    1 + eps_clip_high; 3 is usual."""

    @model_validator(mode="after")
    def dual_clip_is_above_the_clip(self) -> Ppo:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.eps_clip_high:
            raise ValueError(
                f"dual_clip = {self.dual_clip:g} is not above the upper clip, 1 + eps_clip_high ="
                f" {1 + self.eps_clip_high:g}; raise it (3 is usual)"
            )
        return self

    def terms(self, tokens: PolicyTokens, log_ratio: Tensor) -> Terms:
        """-min(r·A, clip(r, 1 - eps_clip, 1 + eps_clip_high)·A) (arXiv:1707.06347, eq. 7).

        DAPO separates the upper clip from the lower one (arXiv:2503.14476, section 3.1). For A < 0,
        dual_clip c > 1 bounds the loss by -c·A (arXiv:1912.09729, eq. 5).
        """
        loss, stopped, _ = clipped(log_ratio, tokens.advantages, self)
        if self.dual_clip is not None:
            negative = tokens.advantages < 0
            stopped = stopped | (negative & (log_ratio.exp() > self.dual_clip))
            bound = loss.minimum(-self.dual_clip * tokens.advantages)
            loss = bound.where(negative, loss)
        return Terms(loss, stopped)


def clipped(log_ratio: Tensor, advantages: Tensor, clip: ClippedLoss) -> Terms:
    """-min(r·A, clip(r)·A), and where the clip stops the gradient."""
    ratio, low, high = log_ratio.exp(), 1 - clip.eps_clip, 1 + clip.eps_clip_high
    loss = -(ratio * advantages).minimum(ratio.clamp(low, high) * advantages)
    stopped = ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))
    return Terms(loss, stopped)
