"""The reference policy's part of a run's settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl.config import LearnerConfig


@dataclass(frozen=True, slots=True)
class RefreshSpec:
    """How published versions become the reference policy."""

    model_path: str
    """Hugging Face checkpoint directory of the policy, whose tensors a version has."""
    model_dtype: str
    """torch's name of the dtype in which parameters are published."""
    place: Path
    """Folder of the attempt's version (`asyncrl.frozen.kept`)."""
    timeout_s: float
    """Seconds in which a version must be fetched and loaded."""


@dataclass(frozen=True, slots=True)
class ReferenceSpec:
    """The settings of one run that its reference policy needs."""

    learner: LearnerConfig
    """The reference policy uses the learner's device, type, packing and threads."""
    path: str
    """Hugging Face checkpoint directory of the frozen weights, or of those before a refresh."""
    temperature: float
    """The rollouts' temperature: log-probs are those of the distribution that was sampled from."""
    num_cpus: float
    """Logical CPUs that the process declares to Ray."""
    gpus: float
    """GPUs that the process declares to Ray, a fraction where it shares one; 0 on the CPU."""
    gpu_memory_utilization: float = 1.0
    """Largest fraction of a GPU's memory that PyTorch may allocate."""
    refresh: RefreshSpec | None = None
    """None = the weights stay frozen."""
    top_k: int = 0
    """Most probable other tokens that a teacher returns for each token."""
    vocabulary: int | None = None
    """Ids of the learner's model. The teacher returns only tokens below it. None = all."""
