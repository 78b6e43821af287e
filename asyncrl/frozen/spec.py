"""What the reference policy's process knows of a run."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config import LearnerConfig

__all__ = ["ReferenceSpec"]


@dataclass(frozen=True, slots=True)
class ReferenceSpec:
    """The settings of one run that its reference policy needs."""

    learner: LearnerConfig
    """Device, type, packing and threads are the learner's."""
    path: str
    """Hugging Face checkpoint directory of the frozen weights."""
    temperature: float
    """Of the rollouts: log-probs are those of the distribution sampled from."""
    num_cpus: float
    """Logical CPUs that the process declares to Ray."""
