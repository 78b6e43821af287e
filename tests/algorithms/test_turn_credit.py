"""Advantages of turns, against numbers computed by hand."""

from __future__ import annotations

import math

import pytest

from asyncrl.algorithms.advantages.dr_grpo import DrGrpo
from asyncrl.algorithms.advantages.group_advantage import TurnRewards
from asyncrl.algorithms.advantages.grpo import Grpo
from asyncrl.algorithms.advantages.rloo import Rloo
from asyncrl.algorithms.turn_credit import turn_advantages, turn_credits


@pytest.mark.parametrize(
    ("rewards", "gamma", "credits"),
    [
        ([1.0, 2.0, 4.0], 0.0, [1.0, 2.0, 4.0]),
        ([1.0, 2.0, 4.0], 1.0, [7.0, 6.0, 4.0]),
        ([1.0, 2.0, 4.0], 0.5, [3.0, 4.0, 4.0]),
        ([1.0, None, 4.0], 0.5, [2.0, 2.0, 4.0]),
        ([1.0, None, 4.0], 0.0, [1.0, None, 4.0]),
        ([None, 4.0, None], 1.0, [4.0, 4.0, None]),
        ([0.0, None], 1.0, [0.0, None]),
        ([], 1.0, []),
    ],
)
def test_the_credit_of_a_turn_has_the_rewards_after_it(
    rewards: list[float | None], gamma: float, credits: list[float | None]
) -> None:
    assert turn_credits(rewards, gamma) == credits


def test_a_turn_is_compared_with_those_of_the_same_number() -> None:
    # Turn 1: 1, 0, 2 with mean 1. Turn 2: 0, 4 with mean 2. Turn 3: one session has it.
    rewards = [[1.0, 0.0, 9.0], [0.0], [2.0, 4.0]]
    found = turn_advantages(rewards, [0.5, -1.0, 0.5], [True] * 3, DrGrpo(), TurnRewards(coef=0.25))
    assert found == [[0.5, 0.0, 0.5], [-1.25], [0.75, 1.0]]
    found = turn_advantages(rewards, [0.5, -1.0, 0.5], [True] * 3, Rloo(), TurnRewards(coef=1.0))
    # rloo: n / (n - 1) times as much, with n = 3 and n = 2.
    assert found == [[0.5, -3.5, 0.5], [-2.5], [2.0, 4.5]]


def test_grpo_divides_by_the_std_of_the_turns() -> None:
    found = turn_advantages(
        [[1.0], [0.0], [2.0]], [0.0] * 3, [True] * 3, Grpo(), TurnRewards(coef=2.0)
    )
    of_one = 2 / (math.sqrt(2 / 3) + 1e-6)
    assert found == [[0.0], [pytest.approx(-of_one)], [pytest.approx(of_one)]]
    equal = turn_advantages([[1.0], [1.0]], [1.0, -1.0], [True] * 2, Grpo(), TurnRewards(coef=2.0))
    assert equal == [[1.0], [-1.0]]


def test_a_session_that_is_not_trained_has_no_part() -> None:
    rewards = [[1.0, 1.0], [3.0, 100.0], [-100.0, 5.0]]
    usable = [True, True, False]
    found = turn_advantages(rewards, [1.0, -1.0, None], usable, DrGrpo(), TurnRewards(coef=1.0))
    assert found == [[0.0, -48.5], [0.0, 48.5], None]


def test_a_turn_without_a_reward_has_the_advantage_of_its_session() -> None:
    rewards = [[None, 1.0], [None, 3.0], [5.0, None]]
    found = turn_advantages(rewards, [1.0, 2.0, -3.0], [True] * 3, DrGrpo(), TurnRewards(coef=1.0))
    assert found == [[1.0, 0.0], [2.0, 3.0], [-3.0, -3.0]]
    assert turn_advantages([[], [2.0]], [1.0, -1.0], [True] * 2, Grpo(), TurnRewards(coef=1.0)) == [
        [],
        [-1.0],
    ]
    assert turn_advantages([], [], [], Grpo(), TurnRewards(coef=1.0)) == []
