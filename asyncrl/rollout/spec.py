"""The settings of rollout workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from asyncrl.config import DataConfig, EnvironmentConfig, ModelConfig, RolloutConfig
from asyncrl.contracts.protocols import Generate


@dataclass(frozen=True, slots=True)
class SessionsSpec:
    """The settings of sessions."""

    environment: EnvironmentConfig
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig
    longest_trajectory: int
    """Most tokens of a turn with everything before it."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The settings of one run that its rollout workers need."""

    rollout: RolloutConfig
    data: DataConfig
    sessions: SessionsSpec | None
    """How sessions are played. None: each trajectory is one completion of the prompt."""
    deadline_s: float
    """Seconds after which a group's generation fails."""
    needs_baseline: bool
    """Whether each group has a greedy completion, in addition to its trajectories."""
    seed: int
    run_id: str
    attempt: int
    generate: Callable[[], Generate]
    """Makes the generator's client; called in the worker."""
