"""The reference policy's part of a run's settings."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config import LearnerConfig

__all__ = ["ReferenceSpec"]


@dataclass(frozen=True, slots=True)
class ReferenceSpec:
    """The settings of one run that its reference policy needs."""

    learner: LearnerConfig
    """The reference policy uses the learner's device, type, packing and threads."""
    path: str
    """Hugging Face checkpoint directory of the frozen weights."""
    temperature: float
    """The rollouts' temperature: log-probs are those of the distribution that was sampled from."""
    num_cpus: float
    """Logical CPUs that the process declares to Ray."""
