"""Conversion of rows to the tensors of a micro-batch: versions, sequences, weights and advantages
of the tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from asyncrl.algorithms.advantages.dr_grpo import DrGrpo
from asyncrl.contracts.group_table import groups_to_table
from asyncrl.contracts.rows import Completion, Group, Prompt, Trajectory, VersionSpan
from asyncrl.learning.examples.batches import examples_of, shuffle_rewards, with_values
from asyncrl.models.micro_batches import micro_batch


def trajectory(
    versions: tuple[VersionSpan, ...], mask: tuple[int, ...], advantage: float
) -> Trajectory:
    length = versions[-1].end
    return Trajectory(
        Completion(tuple(range(10, 10 + length)), (-1.0,) * length, versions, "stop"),
        mask,
        1.0,
        {},
        advantage,
    )


def test_each_loss_token_has_its_version_sequence_and_weight() -> None:
    crossed = trajectory((VersionSpan(3, 0, 2), VersionSpan(5, 2, 4)), (1, 0, 1, 1), 2.0)
    plain = trajectory((VersionSpan(4, 0, 2),), (1, 1), -1.0)
    table = groups_to_table(
        [Group(0, Prompt(0, 0, "p", (1, 2)), (plain, crossed), "replica", 0.0, 1.0, 2.0)]
    )
    examples = examples_of(table)
    assert [example.versions.tolist() for example in examples] == [[4, 4], [3, 3, 5, 5]]

    batch = micro_batch(examples, [0, 1], "cpu", weights=[0.5, 0.25], version=6)
    assert batch.order == (1, 0), "longest first"
    assert batch.targets.tolist() == [10, 12, 13, 10, 11]
    assert batch.ages.tolist() == [3, 1, 1, 2, 2]
    assert batch.sequence.tolist() == [0, 0, 0, 1, 1]
    assert batch.weights.tolist() == [0.25, 0.25, 0.25, 0.5, 0.5]
    assert batch.advantages.tolist() == [2, 2, 2, -1, -1]
    assert batch.policy_tokens(batch.ages).sequences == 2


def test_shuffled_rewards_are_a_permutation() -> None:
    def group(ordinal: int, rewards: tuple[float, ...]) -> Group:
        completion = Completion((10, 11), (-1.0, -1.0), (VersionSpan(0, 0, 2),), "stop")
        members = [Trajectory(completion, (1, 1), reward, {}, 9.0) for reward in rewards]
        masked = Trajectory(completion, (1, 1), 5.0, {}, None, "over_long")
        return Group(
            0, Prompt(ordinal, 0, "p", (1, 2)), (*members, masked), "replica", 0.0, 1.0, 2.0
        )

    tables = [
        groups_to_table([group(0, (0.0, 1.0, 2.0))]),
        groups_to_table([group(1, (3.0, 4.0, 6.0))]),
    ]
    shuffled = shuffle_rewards(tables, DrGrpo(), (0, 1))
    assert (
        shuffled
        == shuffle_rewards(tables, DrGrpo(), (0, 1))
        != shuffle_rewards(tables, DrGrpo(), (0, 2))
    )
    rewards = [table["reward"][0].as_py() for table in shuffled]
    assert sorted(rewards[0][:3] + rewards[1][:3]) == [0, 1, 2, 3, 4, 6] and sorted(
        rewards[0][:3]
    ) != [0, 1, 2]
    assert [values[3] for values in rewards] == [5.0, 5.0], "a masked trajectory keeps its reward"
    advantages = [table["advantage"][0].as_py() for table in shuffled]
    assert [values[3] for values in advantages] == [None, None]
    assert all(abs(sum(values[:3])) < 1e-6 for values in advantages)
    assert [example.advantage for example in examples_of(shuffled[0])] == advantages[0][:3]


def test_advantages_and_returns_of_a_value_head_are_at_the_loss_tokens() -> None:
    member = trajectory((VersionSpan(0, 0, 4),), (1, 0, 1, 1), 1.0)
    [example, _] = examples_of(
        groups_to_table(
            [Group(0, Prompt(0, 0, "p", (1, 2)), (member, member), "replica", 0.0, 1.0, 2.0)]
        )
    )
    valued = with_values(example, np.array([0.2, 0.5, 0.4]), 1.0, 0.5)
    advantages = [0.3 + 0.5 * (-0.1 + 0.5 * 0.6), 0, -0.1 + 0.5 * 0.6, 0.6]
    np.testing.assert_allclose(valued.advantage, advantages)
    np.testing.assert_allclose(valued.returns, [advantages[0] + 0.2, 0, advantages[2] + 0.5, 1.0])
    per_token = np.array([0.5, 9.0, 0.0, 0.25], dtype=np.float32)
    rewarded = with_values(replace(example, token_rewards=per_token), np.zeros(3), 1.0, 0.0)
    np.testing.assert_allclose(
        rewarded.advantage,
        [0.5, 0, 0, 0.5],
        err_msg="the rest of the reward counts for the last token",
    )
    batch = micro_batch([valued], [0], "cpu")
    np.testing.assert_allclose(
        batch.advantages, [advantages[0], advantages[2], advantages[3]], rtol=1e-6
    )
    assert (
        batch.policy_tokens(batch.ages, batch.ages).returns is not None
        and micro_batch([example], [0], "cpu").returns is None
    )
