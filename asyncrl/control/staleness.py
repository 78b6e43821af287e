"""The staleness rule: pace, bound and cut, with one formula each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from asyncrl.contracts.messages import Scored


@dataclass(frozen=True, slots=True)
class Staleness:
    """Decides when a group may be admitted, when it is too stale, and when a batch may be cut.

    The staleness of a trajectory is the learner's version when it trains it, minus the oldest
    version among the tokens that it trains. In the formulas, S = max_staleness (in versions) and
    B = groups_per_step.

    With on_stale `wait`, a batch is cut only if all groups that remain can still be trained in
    time. With `drop`, a batch is cut as soon as it is full, and groups that become too stale are
    dropped. `over_sampling` more groups are then admitted, so that the fastest groups are trained.
    With `mask`, a batch is cut as soon as it is full. Its tokens within the bound are trained, and
    a group is dropped once it has none.
    """

    max_staleness: int
    groups_per_step: int
    on_stale: Literal["wait", "drop", "mask"] = "wait"
    over_sampling: int = 0

    def may_admit(self, outstanding: int, learner_version: int, committed: int) -> bool:
        """Pace: whether one more group may be admitted.

        The rule is outstanding < (S + 1 - lag) * B + over_sampling, with
        lag = learner_version - committed. With `wait`, all these groups can be trained in time. At
        lag > S, a new group would be too stale from the start."""
        lag = learner_version - committed
        return (
            lag <= self.max_staleness
            and outstanding
            < (self.max_staleness + 1 - lag) * self.groups_per_step + self.over_sampling
        )

    def is_stale(self, version: int, learner_version: int) -> bool:
        """Bound: whether tokens of this version are too stale to be trained at
        `learner_version`."""
        return learner_version - version > self.max_staleness

    def deciding_version(self, scored: Scored) -> int:
        """The version that decides when a scored group is too stale: its oldest one. With `mask`,
        the newest one of a token that would be trained."""
        if self.on_stale == "mask" and scored.versions:
            return scored.versions[-1]
        return scored.oldest_version

    def oldest_trained(self, scored: Scored, learner_version: int) -> int:
        """The oldest version among the tokens of a group that are trained at `learner_version`:
        with `mask`, among those within the bound."""
        if self.on_stale != "mask":
            return scored.oldest_version
        fresh = (one for one in scored.versions if not self.is_stale(one, learner_version))
        return next(fresh, scored.oldest_version)

    def may_cut(self, left: Mapping[int, int], learner_version: int) -> bool:
        """Cut: whether a batch may be cut at v = `learner_version`, if `left` groups then remain
        outstanding (oldest version → groups). Always true with `drop` and `mask`.

        With `wait`, at most j * B of those groups may have an oldest version of v - S + j or less,
        for each j = 0 … S. The learner can train that many before they expire.
        """
        if self.on_stale != "wait":
            return True
        oldest = learner_version - self.max_staleness
        return all(
            sum(groups for version, groups in left.items() if version <= oldest + j)
            <= j * self.groups_per_step
            for j in range(self.max_staleness + 1)
        )
