"""The outstanding groups, from admission to outcome. No other module keeps track of them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from asyncrl.contracts.messages import Scored
from asyncrl.control.staleness import Staleness


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

    @property
    def count(self) -> int:
        """How many ordinals have an outcome."""
        return self.lowest + len(self.above)

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
    """The outstanding groups, by ordinal. A batch takes those with the oldest version first.

    Each group is also filed under its state and its oldest version, because control asks about them
    after every group. There are few versions, so no answer looks at all groups. Only this class
    changes a group.
    """

    def __init__(self, staleness: Staleness, frontier: Frontier) -> None:
        self.staleness = staleness
        self.frontier = frontier
        self.groups: dict[int, Outstanding] = {}
        self.running = 0
        """Groups being generated."""
        self.training = 0
        """Groups in the batch that is training."""
        self._unready: dict[int, set[int]] = {}
        """Oldest version → ordinals of the groups that are being generated or scored."""
        self._ready: dict[int, list[int]] = {}
        """Oldest version → ordinals of the ready groups, lowest first."""
        self._expiring: dict[int, set[int]] = {}
        """Deciding version → ordinals of the ready groups. Kept under `mask` only."""

    def __len__(self) -> int:
        """Outstanding groups: running, being scored, ready, or in the batch that is training."""
        return len(self.groups)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self.groups

    @property
    def ready(self) -> int:
        """Groups that wait to be trained."""
        return sum(map(len, self._ready.values()))

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
        self.groups[ordinal] = group = Outstanding(ordinal, committed)
        self._file(group)

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
            self._unfile(group)
            group.running, group.oldest_version, group.tokens = False, oldest_version, tokens
            self._file(group)

    def add_scored(self, scored: Scored) -> None:
        """Mark a group as ready to be trained."""
        group = self.groups[scored.ordinal]
        self._unfile(group)
        group.running, group.oldest_version, group.tokens, group.scored = (
            False,
            scored.oldest_version,
            scored.tokens,
            scored,
        )
        self._file(group)

    def end(self, ordinal: int) -> Outstanding:
        """Remove a group that has its outcome, which frees its slot, and move the frontier."""
        self.frontier.finish(ordinal)
        group = self.groups.pop(ordinal)
        self._unfile(group)
        return group

    def has_stale(self, learner_version: int) -> bool:
        """Whether `stale` returns any group."""
        return any(
            self.staleness.is_stale(version, learner_version)
            for filed in self._may_be_stale()
            for version in filed
        )

    def stale(self, learner_version: int) -> list[int]:
        """Return the groups that are staler than the bound allows. Under `wait` this looks only at
        ready groups, as a last check: the cut rule should leave none."""
        return [
            ordinal
            for filed in self._may_be_stale()
            for version in sorted(filed)
            if self.staleness.is_stale(version, learner_version)
            for ordinal in sorted(filed[version])
        ]

    def has_batch(self, learner_version: int) -> bool:
        """Whether `next_batch` returns a batch."""
        return self._cut(learner_version) is not None

    def next_batch(self, learner_version: int) -> list[Scored] | None:
        """Return the batch to train next, ordered by oldest version, then by ordinal. None while it
        is not full, or while cutting it would let another group expire. Stale groups must have
        ended before.

        With `mask`, the groups with the oldest tokens lose most by waiting. By their newest tokens
        instead, 19% of the tokens were masked instead of 10% (benchmarks/stale_policies.py, S = 4).
        """
        taken = self._cut(learner_version)
        if taken is None:
            return None
        batch = [
            self.groups[ordinal].scored
            for version, count in taken.items()
            for ordinal in self._ready[version][:count]
        ]
        return [scored for scored in batch if scored is not None]

    def untrainable(self, learner_version: int) -> list[int]:
        """Return the ready groups that cannot be trained in time under `wait`. There are none,
        unless the bound or the batch has become smaller since they were admitted, or `on_stale` was
        another policy.

        For each j = 0 … S, there is time for (j + 1) * B groups whose oldest version is at most
        learner_version - S + j. The oldest groups go first.
        """
        if self.staleness.on_stale != "wait":
            return []
        bound, size = self.staleness.max_staleness, self.staleness.groups_per_step
        room = [(j + 1) * size for j in range(bound + 1)]
        left_out = []
        for group in self.waiting():
            age = learner_version - group.oldest_version
            if age <= bound and all(room[bound - age :]):
                room[bound - age :] = [left - 1 for left in room[bound - age :]]
            else:
                left_out.append(group.ordinal)
        return left_out

    def waiting(self) -> list[Outstanding]:
        """Return the ready groups, in the order in which they will be trained."""
        return [
            self.groups[ordinal]
            for version in sorted(self._ready)
            for ordinal in self._ready[version]
        ]

    def take(self, batch: Iterable[Scored]) -> None:
        """Mark the groups of the batch that is about to train."""
        for scored in batch:
            group = self.groups[scored.ordinal]
            self._unfile(group)
            group.training = True
            self._file(group)

    def _cut(self, learner_version: int) -> dict[int, int] | None:
        """Oldest version → groups that the next batch takes from it, oldest version first. None
        while there is no batch."""
        missing, taken = self.staleness.groups_per_step, dict[int, int]()
        masks = self.staleness.on_stale == "mask"
        for version in sorted(self._ready):
            if missing and (masks or not self.staleness.is_stale(version, learner_version)):
                taken[version] = min(missing, len(self._ready[version]))
                missing -= taken[version]
        if missing:
            return None
        left = Counter({version: len(ordinals) for version, ordinals in self._unready.items()})
        left.update({version: len(ordinals) for version, ordinals in self._ready.items()})
        left.subtract(taken)
        return taken if self.staleness.may_cut(left, learner_version) else None

    def _may_be_stale(self) -> list[Mapping[int, Collection[int]]]:
        """The files with the groups that are dropped when they become stale, by the version that
        decides it."""
        match self.staleness.on_stale:
            case "wait":
                return [self._ready]
            case "mask":  # an unfinished group may still get a fresh token
                return [self._expiring]
            case "drop":
                return [self._ready, self._unready]

    def _file(self, group: Outstanding) -> None:
        """File a group under its state and its oldest version."""
        if group.training:
            self.training += 1
        elif group.scored is not None:
            insort(self._ready.setdefault(group.oldest_version, []), group.ordinal)
            if self.staleness.on_stale == "mask":
                decides = self.staleness.deciding_version(group.scored)
                self._expiring.setdefault(decides, set()).add(group.ordinal)
        else:
            self.running += group.running
            self._unready.setdefault(group.oldest_version, set()).add(group.ordinal)

    def _unfile(self, group: Outstanding) -> None:
        """Undo `_file`, before the group changes."""
        version = group.oldest_version
        if group.training:
            self.training -= 1
        elif group.scored is not None:
            ordinals = self._ready[version]
            del ordinals[bisect_left(ordinals, group.ordinal)]
            if not ordinals:
                del self._ready[version]
            if self.staleness.on_stale == "mask":
                decides = self.staleness.deciding_version(group.scored)
                self._expiring[decides].remove(group.ordinal)
                if not self._expiring[decides]:
                    del self._expiring[decides]
        else:
            self.running -= group.running
            self._unready[version].remove(group.ordinal)
            if not self._unready[version]:
                del self._unready[version]
