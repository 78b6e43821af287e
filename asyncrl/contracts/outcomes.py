"""The ways in which a group or a step can end."""

from __future__ import annotations

from dataclasses import dataclass

UNFORESEEN = "not foreseen: "
"""Prefix of a group's failure after an unexpected exception."""
FILTERED = "filtered: "
"""Prefix of a group's failure if the user's filter rejected the group."""
NO_BASELINE = "no baseline: "
"""Prefix of a group's failure if its baseline has no reward."""
NOT_FINITE = "NaN or Inf in loss or gradient"
NOTHING_TO_LEARN = "no trajectory of the batch has a token to learn from"
NO_PAIR = "no group of the batch gives a pair"
WAYS_OUT = {
    NOT_FINITE: "lower learner.learning_rate",
    NO_PAIR: (
        "use prompts whose completions differ in reward, or lower"
        " algorithm.preference.pairs.min_margin"
    ),
    NOTHING_TO_LEARN: (
        "look at status and loss_mask of its rows; with staleness.on_stale: mask, every token may"
        " be beyond the bound"
    ),
}
"""Reason for a skipped step → what to do about it."""
OUTCOMES = ("trained", "skipped", "filtered", "dropped", "failed", "waiting")
"""`waiting`: the group had no other outcome when the attempt ended."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one admitted group.

    The column `ended_in` of the outcomes file has the attempt that decided the outcome. It differs
    from `attempt` if the group waited in a checkpoint.
    """

    attempt: int
    """The attempt that generated the group."""
    ordinal: int
    outcome: str
    reason: str
    step: int
    trained_at_version: int | None = None
    """Set for trained groups only, as is `staleness`."""
    staleness: int | None = None
    completion_tokens: int | None = None
    """Tokens of the group's completions. None if the group was not generated to its end."""
    content: str | None = None
    """Hash of the group's row; None if the group was not scored."""

    def __post_init__(self) -> None:
        if self.outcome not in OUTCOMES:
            raise ValueError(f"outcome {self.outcome!r} is not one of {OUTCOMES}")
