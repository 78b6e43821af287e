"""The staleness rule: pace, bound and cut, each one formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Staleness"]


@dataclass(frozen=True, slots=True)
class Staleness:
    """S = max_staleness versions, B = groups_per_step groups.

    Staleness of a trajectory = the learner's version when it trains it - the oldest version among
    its tokens.

    on_stale `wait`: a batch is cut only if everything left can still be trained in time. `drop`: it
    is cut as soon as it is full, and whatever can no longer be trained in time is dropped;
    `over_sampling` further groups are then admitted, and the fastest win.
    """

    max_staleness: int
    groups_per_step: int
    on_stale: Literal["wait", "drop"] = "wait"
    over_sampling: int = 0

    def may_admit(self, outstanding: int, learner_version: int, committed: int) -> bool:
        """Pace: outstanding < (S + 1 - lag) * B + over_sampling, lag = learner_version - committed;
        without over-sampling, all of that can be trained in time. At lag > S a group would begin
        too old."""
        lag = learner_version - committed
        return (
            lag <= self.max_staleness
            and outstanding
            < (self.max_staleness + 1 - lag) * self.groups_per_step + self.over_sampling
        )

    def is_stale(self, oldest_version: int, learner_version: int) -> bool:
        """Bound: trained at learner_version, a group begun at this version would be staler than
        S."""
        return learner_version - oldest_version > self.max_staleness

    def may_cut(self, left: Sequence[int], learner_version: int) -> bool:
        """May a batch be cut at v that leaves outstanding groups begun at the versions `left`?
        Always under `drop`.

        Under `wait`, for every j = 0 … S, at most j * B of them may have begun at v - S + j or
        before: so many can be trained before they expire.
        """
        if self.on_stale == "drop":
            return True
        oldest = learner_version - self.max_staleness
        return all(
            sum(oldest_version <= oldest + j for oldest_version in left) <= j * self.groups_per_step
            for j in range(self.max_staleness + 1)
        )
