"""The settings of rollout workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from asyncrl.config import EnvironmentConfig, RolloutConfig
from asyncrl.contracts.protocols import Generate


@dataclass(frozen=True, slots=True)
class SessionsSpec:
    """The settings of sessions."""

    environment: EnvironmentConfig
    model_path: str
    max_length: int
    """Most tokens of a turn with everything before it."""
    rollout_stop: tuple[str, ...]
    rollout_stop_token_ids: tuple[int, ...]
    variables: Mapping[str, object]
    """Of the chat template."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The settings of one run that its rollout workers need."""

    rollout: RolloutConfig
    max_length: int | None
    """Most tokens of prompt plus completion; None = no limit."""
    deadline_s: float
    """Seconds after which a group's generation fails."""
    seed: int
    run_id: str
    attempt: int
    generate: Callable[[], Generate]
    """Makes the generator's client; called in the worker."""
    baseline: bool = False
    """Whether each group has a greedy completion, in addition to its trajectories."""
    sessions: SessionsSpec | None = None
    """None: each trajectory is one completion of the prompt."""
