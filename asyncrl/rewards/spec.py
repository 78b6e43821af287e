"""The settings that scoring needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.config import (
    AlgorithmConfig,
    DataConfig,
    EnvironmentConfig,
    RewardConfig,
    RolloutConfig,
    completion_room,
)
from asyncrl.text.answer import AnswerFormat


@dataclass(frozen=True, slots=True)
class ScoringSpec:
    """The settings of one run that its scoring needs."""

    reward: RewardConfig
    algorithm: AlgorithmConfig
    rollout: RolloutConfig
    data: DataConfig
    environment: EnvironmentConfig | None
    longest_trajectory: int
    """Tokens of the longest possible trajectory."""
    most_session_tokens: int | None
    """Most tokens of all rows of a session, if the objective needs them in one micro-batch."""
    answers: AnswerFormat = field(default_factory=AnswerFormat)
    """How answers are found in the completions of the model."""

    def completion_room(self, prompt_tokens: int) -> int:
        """Most tokens that the completion of a prompt of `prompt_tokens` may have."""
        return completion_room(
            self.rollout.max_completion_length, self.data.max_length, prompt_tokens
        )
