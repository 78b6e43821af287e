"""The staleness rule: pace, bound and cut, each one formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Staleness"]


@dataclass(frozen=True, slots=True)
class Staleness:
    """S = max_staleness versions, B = groups_per_step groups.

    Staleness of a trajectory = the learner's version when it trains it - the oldest version among its tokens.
    """

    max_staleness: int
    groups_per_step: int

    def may_admit(self, outstanding: int, learner_version: int, committed: int) -> bool:
        """Pace: outstanding < (S + 1 - (learner_version - committed)) * B, so that what is admitted now can still be trained in time."""
        return outstanding < (self.max_staleness + 1 - (learner_version - committed)) * self.groups_per_step

    def is_stale(self, begun: int, learner_version: int) -> bool:
        """Bound: trained at learner_version, a group begun at this version would be staler than S."""
        return learner_version - begun > self.max_staleness

    def may_cut(self, left: Sequence[int], learner_version: int) -> bool:
        """`on_stale: wait`: may a batch be cut at v that leaves outstanding groups begun at the versions `left`?

        For every j = 0 … S, at most j * B of them may have begun at v - S + j or before: so many can be trained before they expire.
        """
        oldest = learner_version - self.max_staleness
        return all(sum(begun <= oldest + j for begun in left) <= j * self.groups_per_step for j in range(self.max_staleness + 1))
