"""The settings that scoring needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.config import AlgorithmConfig, RewardConfig, completion_room
from asyncrl.text.answer import AnswerFormat


@dataclass(frozen=True, slots=True)
class ScoringSpec:
    """The settings of one run that its scoring needs."""

    reward: RewardConfig
    algorithm: AlgorithmConfig
    max_completion_length: int
    """Tokens."""
    max_length: int | None
    """Tokens of prompt and completion together; None = no limit on the sum."""
    longest_trajectory: int
    """Tokens of the longest possible trajectory."""
    train_ends: frozenset[str] | None = None
    """Ends of the sessions that are trained; None without an environment."""
    answers: AnswerFormat = field(default_factory=AnswerFormat)
    """How answers are found in the completions of the model."""
    most_session_tokens: int | None = None
    """Most tokens of all rows of a session, if the objective needs them in one micro-batch."""

    def completion_room(self, prompt_tokens: int) -> int:
        """Most tokens that the completion of a prompt of `prompt_tokens` may have."""
        return completion_room(self.max_completion_length, self.max_length, prompt_tokens)
