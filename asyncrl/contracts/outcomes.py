"""How a group or a step may end."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "FILTERED",
    "NOTHING_TO_LEARN",
    "NOT_FINITE",
    "OUTCOMES",
    "UNFORESEEN",
    "WAYS_OUT",
    "Outcome",
]

UNFORESEEN = "not foreseen: "
"""How the failure of a group begins that ended with an exception nobody foresaw."""
FILTERED = "filtered: "
"""How the failure of a group begins that the user's own filter left out."""
NOT_FINITE = "NaN or Inf in loss or gradient"
NOTHING_TO_LEARN = "no trajectory of the batch has a token to learn from"
WAYS_OUT = {
    NOT_FINITE: "lower learner.learning_rate",
    NOTHING_TO_LEARN: "look at status and loss_mask of its rows",
}
"""Why a step was skipped, and what to do about it."""
OUTCOMES = ("trained", "skipped", "filtered", "dropped", "failed", "waiting")
"""`waiting`: admitted and without another outcome when the attempt ended."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one admitted group. Version and staleness only if it was trained; its
    completion tokens if it was generated: a group aborted in mid-generation has none. `attempt`
    made the group, as in its own row; the file's column `ended_in` has the one that decided:
    another, if the group waited in a checkpoint."""

    attempt: int
    ordinal: int
    outcome: str
    reason: str
    step: int
    trained_at_version: int | None = None
    staleness: int | None = None
    completion_tokens: int | None = None
    content: str | None = None
    """Hash of the group's row; None if it was not scored."""

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome {self.outcome!r} is none of {OUTCOMES}")
