"""The outstanding groups, from admission to outcome. No other module keeps track of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from asyncrl.contracts.messages import Scored
from asyncrl.control.staleness import Staleness

__all__ = ["Buffer", "Frontier", "Outstanding"]


@dataclass(slots=True)
class Outstanding:
    """An admitted group without an outcome. Until its generation finishes, `oldest_version` is a
    lower bound: the version that was committed at its admission."""

    ordinal: int
    oldest_version: int
    running: bool = True
    scored: Scored | None = None
    training: bool = False
    tokens: int | None = None
    """Completion tokens, once generated."""
    made_in: int | None = None
    """The attempt that made it, for a group from a checkpoint; None = this attempt."""


class Frontier:
    """The ordinals that have an outcome: all below `lowest`, and those in `above`."""

    def __init__(self, lowest: int = 0, above: Iterable[int] = ()) -> None:
        self.lowest = lowest
        self.above = set(above)

    def finish(self, ordinal: int) -> None:
        """Mark an ordinal as finished.

        Raises:
            ValueError: it is finished already.
        """
        if ordinal < self.lowest or ordinal in self.above:
            raise ValueError(f"ordinal {ordinal} has an outcome already")
        self.above.add(ordinal)
        while self.lowest in self.above:
            self.above.remove(self.lowest)
            self.lowest += 1


class Buffer:
    """The outstanding groups, by ordinal. A batch takes those with the oldest version first."""

    def __init__(self, staleness: Staleness, frontier: Frontier) -> None:
        self.staleness = staleness
        self.frontier = frontier
        self.groups: dict[int, Outstanding] = {}

    def __len__(self) -> int:
        """Outstanding groups: running, being scored, ready, or in the batch that is training."""
        return len(self.groups)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self.groups

    @property
    def running(self) -> int:
        """Groups being generated."""
        return sum(group.running for group in self.groups.values())

    @property
    def ready(self) -> int:
        """Groups that wait to be trained."""
        return sum(
            group.scored is not None and not group.training for group in self.groups.values()
        )

    def admit(self, ordinal: int, committed: int) -> None:
        """Add a group that starts to run.

        Raises:
            ValueError: the ordinal is outstanding or finished already.
        """
        if (
            ordinal in self.groups
            or ordinal < self.frontier.lowest
            or ordinal in self.frontier.above
        ):
            raise ValueError(f"ordinal {ordinal} was admitted before")
        self.groups[ordinal] = Outstanding(ordinal, committed)

    def restore(self, scored: Scored, made_in: int) -> None:
        """Add a scored group from a checkpoint."""
        self.admit(scored.ordinal, scored.oldest_version)
        self.groups[scored.ordinal].made_in = made_in
        self.add_scored(scored)

    def finished(self, ordinal: int, oldest_version: int, tokens: int) -> None:
        """Note that a group is generated, which fixes its oldest version. A second copy of a group
        that is already scored, made because the first seemed lost, changes nothing."""
        group = self.groups.get(ordinal)
        if group is not None and group.scored is None:
            group.running, group.oldest_version, group.tokens = False, oldest_version, tokens

    def add_scored(self, scored: Scored) -> None:
        """Mark a group as ready to be trained."""
        group = self.groups[scored.ordinal]
        group.running, group.oldest_version, group.tokens, group.scored = (
            False,
            scored.oldest_version,
            scored.tokens,
            scored,
        )

    def end(self, ordinal: int) -> Outstanding:
        """Remove a group that has its outcome, which frees its slot, and move the frontier."""
        self.frontier.finish(ordinal)
        return self.groups.pop(ordinal)

    def stale(self, learner_version: int) -> list[int]:
        """Return the groups that are staler than the bound allows. Under `wait` this looks only at
        ready groups, as a last check: the cut rule should leave none."""
        candidates = (
            self._ready()
            if self.staleness.on_stale == "wait"
            else [g for g in self.groups.values() if not g.training]
        )
        return [
            g.ordinal
            for g in candidates
            if self.staleness.is_stale(g.oldest_version, learner_version)
        ]

    def next_batch(self, learner_version: int) -> list[Scored] | None:
        """Return the batch to train next, ordered by oldest version, then by ordinal. None while it
        is not full, or while cutting it would let another group expire."""
        ready = [
            g
            for g in self._ready()
            if not self.staleness.is_stale(g.oldest_version, learner_version)
        ]
        batch = ready[: self.staleness.groups_per_step]
        if len(batch) < self.staleness.groups_per_step:
            return None
        taken = {group.ordinal for group in batch}
        if not self.staleness.may_cut(
            [g.oldest_version for g in self.groups.values() if g.ordinal not in taken],
            learner_version,
        ):
            return None
        return [group.scored for group in batch if group.scored is not None]

    def untrainable(self, learner_version: int) -> list[int]:
        """Return the ready groups that cannot be trained in time under `wait`. There are none,
        unless the bound or the batch has become smaller since they were admitted.

        For each j = 0 … S, there is time for (j + 1) * B groups whose oldest version is at most
        learner_version - S + j. The oldest groups go first.
        """
        if self.staleness.on_stale == "drop":
            return []
        bound, size = self.staleness.max_staleness, self.staleness.groups_per_step
        room = [(j + 1) * size for j in range(bound + 1)]
        left_out = []
        for group in self._ready():
            age = learner_version - group.oldest_version
            if age <= bound and all(room[bound - age :]):
                room[bound - age :] = [left - 1 for left in room[bound - age :]]
            else:
                left_out.append(group.ordinal)
        return left_out

    def waiting(self) -> list[Outstanding]:
        """Return the ready groups, in the order in which they will be trained."""
        return self._ready()

    def take(self, batch: Iterable[Scored]) -> None:
        """Mark the groups of the batch that is about to train."""
        for scored in batch:
            self.groups[scored.ordinal].training = True

    def _ready(self) -> list[Outstanding]:
        ready = [g for g in self.groups.values() if g.scored is not None and not g.training]
        return sorted(ready, key=lambda group: (group.oldest_version, group.ordinal))
