"""The buffer files groups by state and version. Its answers must be those of a look at all groups,
without such a look."""

from __future__ import annotations

import random
from typing import Any, NoReturn

import pytest

from asyncrl.contracts.messages import Scored
from asyncrl.control.buffer import Buffer, Frontier, Outstanding
from asyncrl.control.staleness import Staleness

OPERATIONS = 400


def scored(ordinal: int, oldest_version: int) -> Scored:
    """A scored group. Every third one has a token of a later version too."""
    newest = oldest_version + (ordinal % 3 == 0)
    return Scored(
        ordinal, oldest_version, None, 4, (0.0, 1.0), {}, 2, 0, newest, (oldest_version, newest)
    )


class Unscanned(dict[int, Any]):
    """Groups that can only be found by their ordinal."""

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError("a look at all groups, whose number has no bound")

    __iter__ = keys = values = items = _refuse  # type: ignore[assignment]


def deciding(group: Outstanding, rule: Staleness) -> int:
    """The version that decides whether the group is stale."""
    masks = rule.on_stale == "mask" and group.scored is not None
    return group.scored.newest if masks and group.scored else group.oldest_version


def expected(buffer: Buffer, version: int) -> dict[str, Any]:
    """What the buffer must answer, found by a look at all groups."""
    rule, groups = buffer.staleness, list(buffer.groups.values())
    ready = sorted(
        (group for group in groups if group.scored is not None and not group.training),
        key=lambda group: (group.oldest_version, group.ordinal),
    )
    stale = [
        group.ordinal
        for group in (groups if rule.on_stale == "drop" else ready)
        if version - deciding(group, rule) > rule.max_staleness and not group.training
    ]
    # With `mask`, groups without a fresh token end before a batch is cut.
    fresh = [group for group in ready if group.ordinal not in stale or rule.on_stale == "mask"]
    batch = [group.ordinal for group in fresh[: rule.groups_per_step]]
    left = [
        group.oldest_version
        for group in groups
        if group.ordinal not in batch and not group.training
    ]
    in_time = rule.on_stale != "wait" or all(
        sum(oldest <= version - rule.max_staleness + j for oldest in left)
        <= j * rule.groups_per_step
        for j in range(rule.max_staleness + 1)
    )
    return {
        "running": sum(group.running for group in groups),
        "training": sum(group.training for group in groups),
        "ready": len(ready),
        "waiting": [group.ordinal for group in ready],
        "stale": sorted(stale),
        "batch": batch if len(batch) == rule.groups_per_step and in_time else None,
    }


def answers(buffer: Buffer, version: int) -> dict[str, Any]:
    batch, stale = buffer.next_batch(version), buffer.stale(version)
    assert buffer.has_batch(version) == (batch is not None)
    assert buffer.has_stale(version) == bool(stale)
    return {
        "running": buffer.running,
        "training": buffer.training,
        "ready": buffer.ready,
        "waiting": [group.ordinal for group in buffer.waiting()],
        "stale": sorted(stale),
        "batch": None if batch is None else [group.ordinal for group in batch],
    }


@pytest.mark.parametrize("on_stale", ["wait", "drop", "mask"])
@pytest.mark.parametrize("seed", range(6))
def test_every_answer_is_that_of_a_look_at_all_groups(seed: int, on_stale: Any) -> None:
    chance, version, batches = random.Random(seed), 0, 0
    rule = Staleness(chance.randrange(4), chance.randrange(1, 4), on_stale, chance.randrange(3))
    buffer = Buffer(rule, Frontier())
    for ordinal in range(OPERATIONS):
        oldest = max(0, version - chance.randrange(rule.max_staleness + 2))
        if chance.random() < 0.1:
            buffer.restore(scored(ordinal, oldest), made_in=0)
        else:
            buffer.admit(ordinal, oldest)
        known = list(buffer.groups.values())
        for group in chance.sample(known, min(3, len(known))):
            if group.scored is None:
                newer = group.oldest_version + chance.randrange(2)
                buffer.finished(group.ordinal, newer, 4)
                if chance.random() < 0.5:
                    buffer.add_scored(scored(group.ordinal, newer + chance.randrange(2)))
            elif chance.random() < 0.1:
                buffer.finished(group.ordinal, 99, 99)  # a second copy changes nothing
                buffer.add_scored(scored(group.ordinal, group.oldest_version + 1))
        assert answers(buffer, version) == expected(buffer, version)
        if batch := buffer.next_batch(version):
            buffer.take(batch)
            assert answers(buffer, version) == expected(buffer, version)
            for group in batch:
                buffer.end(group.ordinal)
            version, batches = version + 1, batches + 1
        if chance.random() < 0.3:
            oldest = version - rule.max_staleness
            for late in [g.ordinal for g in known if g.ordinal in buffer]:
                if buffer.groups[late].oldest_version <= oldest or chance.random() < 0.1:
                    buffer.end(late)
        if chance.random() < 0.05:
            version += 1
        assert answers(buffer, version) == expected(buffer, version)
    assert batches > 10


def test_a_group_costs_no_look_at_all_groups() -> None:
    buffer = Buffer(Staleness(2, 4), Frontier())
    buffer.groups = Unscanned()
    for ordinal in range(12):
        buffer.admit(ordinal, 0)
    for ordinal in range(12):
        buffer.finished(ordinal, 0, 4)
        buffer.add_scored(scored(ordinal, 0))
        assert (buffer.running, buffer.ready) == (11 - ordinal, ordinal + 1)
        assert buffer.has_batch(0) == (ordinal >= 3) and not buffer.has_stale(0)
    batch = buffer.next_batch(0)
    assert batch is not None
    buffer.take(batch)
    for group in batch:
        buffer.end(group.ordinal)
    assert not buffer.stale(1) and buffer.has_stale(3) and len(buffer.stale(3)) == 8
