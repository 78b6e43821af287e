"""The three staleness formulas on hand-computed numbers, and the order of the buffer."""

from collections import Counter

import pytest

from asyncrl.contracts.messages import Scored
from asyncrl.control.buffer import Buffer, Frontier
from asyncrl.control.staleness import Staleness


def scored(ordinal, oldest_version):
    return Scored(ordinal, oldest_version, None, 4, (0.0, 1.0), {}, 2, 0)


@pytest.mark.parametrize(
    ("outstanding", "learner", "committed", "admitted"),
    [
        (0, 0, 0, True),
        (11, 0, 0, True),
        (12, 0, 0, False),
        (7, 5, 4, True),
        (8, 5, 4, False),
        (3, 6, 4, True),
        (4, 6, 4, False),
        (0, 7, 4, False),
    ],
)
def test_pace(outstanding, learner, committed, admitted):
    assert Staleness(2, 4).may_admit(outstanding, learner, committed) is admitted


def test_bound():
    assert not Staleness(2, 4).is_stale(3, learner_version=5)
    assert Staleness(2, 4).is_stale(2, learner_version=5)


@pytest.mark.parametrize(
    ("left", "cut"),
    [
        ([], True),
        ([3], False),
        ([4] * 4, True),
        ([4] * 5, False),
        ([4] * 4 + [5] * 4, True),
        ([4] * 4 + [5] * 5, False),
        ([5] * 8, True),
        ([5] * 9, False),
    ],
)
def test_wait_cuts_only_if_the_remaining_groups_can_be_trained(left, cut):
    assert Staleness(2, 4).may_cut(Counter(left), learner_version=5) is cut


def test_batch_takes_the_oldest_version_then_the_lowest_ordinal():
    buffer = Buffer(Staleness(4, 2), Frontier())
    for ordinal, oldest_version in [(0, 2), (1, 1), (2, 1), (3, 0)]:
        buffer.admit(ordinal, oldest_version)
        buffer.add_scored(scored(ordinal, oldest_version))
    assert [s.ordinal for s in buffer.next_batch(4)] == [3, 1]


def test_a_running_group_that_is_about_to_expire_delays_the_cut():
    buffer = Buffer(Staleness(1, 1), Frontier())
    buffer.admit(0, 0)
    buffer.admit(1, 1)
    buffer.add_scored(scored(1, 1))
    assert buffer.next_batch(1) is None
    buffer.add_scored(scored(0, 0))
    assert [s.ordinal for s in buffer.next_batch(1)] == [0]


def test_the_frontier_moves_past_finished_ordinals():
    frontier = Frontier()
    for ordinal in (2, 0, 4, 1):
        frontier.finish(ordinal)
    assert (frontier.lowest, frontier.above) == (3, {4})
    with pytest.raises(ValueError, match="outcome already"):
        frontier.finish(1)


def test_with_mask_only_versions_of_trained_tokens_decide():
    """A masked trajectory may have the group's oldest and newest tokens."""
    rule = Staleness(2, 1, "mask")
    group = Scored(0, 0, None, 9, (0.0, 1.0), {}, 2, 0, newest=9, versions=(1, 3))
    assert rule.deciding_version(group) == 3
    assert [rule.oldest_trained(group, version) for version in (3, 4, 5)] == [1, 3, 3]
    assert Staleness(2, 1, "wait").deciding_version(group) == 0
    buffer = Buffer(rule, Frontier())
    buffer.admit(0, 0)
    buffer.add_scored(group)
    assert not buffer.has_stale(5) and buffer.next_batch(5) == [group]
    assert buffer.stale(6) == [0]
