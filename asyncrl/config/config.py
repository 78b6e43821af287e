"""The config of a run: its settings, their derived values, and the check of the rules between
them."""

from __future__ import annotations

from pydantic import model_validator

import asyncrl.config.derived as derived
from asyncrl.config.rules import check_rules
from asyncrl.config.settings import Settings


class Config(Settings):
    """Every setting of a run."""

    @model_validator(mode="after")
    def settings_fit_together(self) -> Config:
        check_rules(self)
        return self

    @property
    def deadline_s(self) -> float:
        """Seconds after which a group's generation fails."""
        return derived.deadline_s(self)

    def evaluation_deadline_s(self, tokens: int | None) -> float:
        """Seconds after which a completion of an evaluation is late. `tokens` is its longest
        completion; None = as in rollouts."""
        return self.rollout.deadline_s or derived.deadline(self, tokens).value

    @property
    def max_num_seqs(self) -> int:
        """Sequences that one engine runs at once."""
        return derived.max_num_seqs(self)

    @property
    def start_timeout_s(self) -> float:
        """Seconds from a replica's placement to its first answer."""
        return self.generator.start_timeout_s or derived.start(self.model.path).value

    @property
    def stall_timeout_s(self) -> float:
        """Seconds without any answer from an engine before it is replaced."""
        return derived.stall_timeout_s(self)

    @property
    def push_timeout_s(self) -> float:
        """Seconds that a replica may take to apply a version."""
        return derived.push_timeout_s(self)

    @property
    def commit_grace_s(self) -> float:
        """Seconds that a version waits for all live replicas."""
        return (
            derived.grace(self).value
            if self.weights.commit_grace_s is None
            else self.weights.commit_grace_s
        )

    @property
    def placement_wait_s(self) -> float:
        return self.placement_timeout_s or derived.placement(self).value
