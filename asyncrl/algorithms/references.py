"""What a policy gradient does with a frozen policy: a KL term in the loss or in the reward. This
module imports no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeAlias

from pydantic import Field

from asyncrl.algorithms.kl import KLEstimator
from asyncrl.contracts.section import ByKey, Section
from asyncrl.runtime.setting_paths import ModelPath


class FrozenPolicy(Section):
    """A frozen policy that scores what the learner trains, in a process of its own."""

    ref_load: ModelPath | None = None
    """Reference policy: a Hugging Face checkpoint directory or a name on the hub. Default:
    model.path. `{runs_root}` in it is replaced."""
    update_interval: int | None = Field(default=None, gt=0)
    """Versions between two refreshes of the reference policy. It takes the weights of each version
    that is a multiple of this, and steps wait for it. Not with lora. None = it stays frozen."""
    num_cpus: float = Field(default=0.2, ge=0)
    """Logical CPUs that its process declares to Ray."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Largest fraction of a GPU's memory that PyTorch may allocate in it, with `placement: share`:
    0.1 by default. In other placements it has a GPU of its own."""


class KlInLoss(Section):
    """The KL divergence from the frozen policy is a part of the loss."""

    KEY: ClassVar[str] = "kl_loss_coef"

    kl_loss_coef: float = Field(gt=0)
    """Add this times the KL divergence to the loss, aggregated like the loss."""
    estimator: KLEstimator = "k3"
    """With l = log π_ref / π: -l, l²/2, e^l - 1 - l, or the last one capped at 10 (low_var)."""
    cap: float = Field(default=2.0, ge=1)
    """Each token is weighted by π_learner / π_behavior, at most this."""

    @property
    def coef(self) -> float:
        """Weight of the divergence."""
        return self.kl_loss_coef


class KlInReward(Section):
    """The KL divergence from the frozen policy lowers the reward."""

    KEY: ClassVar[str] = "kl_coef"
    estimator: ClassVar[KLEstimator] = "k1"
    """The only estimator with the right gradient in the reward."""

    kl_coef: float = Field(gt=0)
    """Subtract this times the trajectory's KL divergence, summed over its trained tokens, from the
    reward. Not with filter_zero_variance, and not with every advantage: dividing by the rewards'
    std would undo the coefficient."""

    @property
    def coef(self) -> float:
        """Weight of the divergence."""
        return self.kl_coef


class ReferenceInLoss(FrozenPolicy, KlInLoss):
    """A reference policy, and the KL divergence from it as a part of the loss."""


class ReferenceInReward(FrozenPolicy, KlInReward):
    """A reference policy. The KL divergence from it lowers the reward."""


KlTerm: TypeAlias = Annotated[KlInLoss | KlInReward, ByKey()]
Reference: TypeAlias = Annotated[ReferenceInLoss | ReferenceInReward, ByKey()]
