"""The reference policy's part of a run's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import LearnerConfig, ModelConfig


@dataclass(frozen=True, slots=True)
class RefreshSpec:
    """How published versions become the reference policy."""

    model: ModelConfig
    """The policy, whose tensors a version has."""
    folder: Path
    """Folder of the attempt's version (`asyncrl.learning.frozen.reference_files`)."""
    push_timeout_s: float
    """Seconds in which a version must be fetched and loaded."""


@dataclass(frozen=True, slots=True)
class ReferenceSpec:
    """The settings of one run that its reference policy needs."""

    learner: LearnerConfig
    """The reference policy uses the learner's device, type, packing and threads."""
    reference_path: str
    """Hugging Face checkpoint directory of the frozen weights, or of those before a refresh."""
    temperature: float
    """The rollouts' temperature: log-probs are those of the distribution that was sampled from."""
    num_cpus: float
    """Logical CPUs that the process declares to Ray."""
    reference_gpus: float
    """GPUs that the process declares to Ray, and of whose memory PyTorch may allocate as much; 0 on
    the CPU."""
    refresh: RefreshSpec | None = None
    """None = the weights stay frozen."""
    top_k: int = 0
    """Most probable other tokens that a teacher returns for each token."""
    vocabulary: int | None = None
    """Ids of the learner's model. The teacher returns only tokens below it. None = all."""
