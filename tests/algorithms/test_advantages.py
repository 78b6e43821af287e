import math

import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import GroupInputs, group_advantages
from asyncrl.algorithms.advantages.dr_grpo import DrGrpo
from asyncrl.algorithms.advantages.gdpo import Gdpo
from asyncrl.algorithms.advantages.grpo import Grpo
from asyncrl.algorithms.advantages.grpo_batch_std import GrpoBatchStd
from asyncrl.algorithms.advantages.maxrl import MaxRl
from asyncrl.algorithms.advantages.opo import Opo
from asyncrl.algorithms.advantages.over_step import (
    normalized,
    over_std,
    standardized,
)
from asyncrl.algorithms.advantages.pass_at_k import PassAtK
from asyncrl.algorithms.advantages.reinforce_plus_plus import (
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
)
from asyncrl.algorithms.advantages.remax import ReMax
from asyncrl.algorithms.advantages.rloo import Rloo
from asyncrl.algorithms.overlong import Overlong


def test_grpo_on_hand_computed_numbers() -> None:
    # mean 1, deviations -1, 0, 1, 0; population std sqrt(2 / 4)
    std = math.sqrt(0.5)
    assert group_advantages([0.0, 1.0, 2.0, 1.0], [True] * 4, Grpo()) == pytest.approx(
        [-1 / (std + 1e-6), 0, 1 / (std + 1e-6), 0]
    )


def test_dr_grpo_on_hand_computed_numbers() -> None:
    assert group_advantages([0.0, 1.0, 2.0, 2.0], [True] * 4, DrGrpo()) == pytest.approx(
        [-1.25, -0.25, 0.75, 0.75]
    )


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    assert group_advantages([0.0, 1.0, 5.0], [True] * 3, Rloo()) == pytest.approx(
        [0 - 3, 1 - 2.5, 5 - 0.5]
    )


def test_remax_compares_with_the_greedy_completion() -> None:
    # Rewards 1, 0 and 0.25, and 0.75 of the greedy completion. The masked one does not count.
    greedy = GroupInputs(baseline=0.75)
    found = group_advantages([1.0, 0.0, 9.0, 0.25], [True, True, False, True], ReMax(), greedy)
    assert found == [0.25, -0.75, None, -0.5]
    assert group_advantages([1.0], [True], ReMax(), greedy) == [0.25], "one sample is enough"
    assert group_advantages([0.75, 0.75], [True] * 2, ReMax(), greedy) == [0.0, 0.0]
    equal = group_advantages([0.0, 0.0], [True] * 2, ReMax(), greedy)
    assert equal == [-0.75, -0.75], "equal rewards teach where the greedy completion differs"
    for baseline in (None, math.nan):
        with pytest.raises(ValueError, match=r"remax got the baseline (None|nan); give the reward"):
            group_advantages([1.0], [True], ReMax(), GroupInputs(baseline=baseline))


def test_remaxs_baseline_leaves_the_gradients_expectation_alone() -> None:
    """E[A · ∇ log π] over all actions of a softmax is that without a baseline, because the greedy
    action's reward does not depend on the sampled one."""
    probabilities, rewards = np.array([0.5, 0.3, 0.2]), [1.0, 4.0, 0.0]
    scores = np.eye(3) - probabilities  # ∇ log π of each action with respect to the logits
    greedy = rewards[int(probabilities.argmax())]
    of_remax = [
        group_advantages([reward], [True], ReMax(), GroupInputs(baseline=greedy))[0]
        for reward in rewards
    ]
    with_baseline = probabilities * np.array(of_remax, float) @ scores
    np.testing.assert_allclose(with_baseline, probabilities * rewards @ scores, atol=1e-12)


def test_maxrl_divides_by_the_mean() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0], [True] * 4, MaxRl()) == pytest.approx(
        [3.0, -1.0, -1.0, -1.0], rel=1e-5
    )
    assert group_advantages([0.0, 0.0], [True] * 2, MaxRl()) == [0.0, 0.0]
    with pytest.raises(ValueError, match="0 and above"):
        group_advantages([1.0, -1.0], [True] * 2, MaxRl())


def test_opo_weights_the_baseline_by_length() -> None:
    # (1 · 1 + 0 · 2 + 2 · 5) / 8 = 1.375; the masked trajectory does not count.
    found = group_advantages(
        [1.0, 9.0, 0.0, 2.0], [True, False, True, True], Opo(), GroupInputs(lengths=[1, 7, 2, 5])
    )
    assert found == [pytest.approx(-0.375), None, pytest.approx(-1.375), pytest.approx(0.625)]
    same = group_advantages([0.0, 1.0], [True] * 2, Opo(), GroupInputs(lengths=[4, 4]))
    assert same == [-0.5, 0.5], "equal lengths: dr_grpo"
    assert group_advantages([3.0], [True], Opo(), GroupInputs(lengths=[2])) == [0.0]
    equal = group_advantages([0.7] * 3, [True] * 3, Opo(), GroupInputs(lengths=[1, 2, 3]))
    assert equal == pytest.approx([0.0] * 3, abs=1e-12)


def test_opos_baseline_minimizes_the_variance_where_squared_gradients_grow_with_length() -> None:
    """The variance of (r - b)·g is E[g²(r - b)²] - const, and g² is proportional to the length."""
    rewards, lengths = np.array([1.0, 0.0, 3.0]), np.array([2, 7, 1])
    found = group_advantages(rewards.tolist(), [True] * 3, Opo(), GroupInputs(lengths=[2, 7, 1]))
    baseline = rewards[0] - found[0]

    def variance(b: float) -> float:
        return float((lengths * (rewards - b) ** 2).sum())

    assert variance(baseline) < min(variance(baseline - 1e-3), variance(baseline + 1e-3))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (GroupInputs(), r"opo got the lengths \[\] of 2 usable trajectories"),
        (GroupInputs(lengths=[0, 2]), r"opo got the lengths \[0, 2\]"),
        (GroupInputs(lengths=[1, 2, 3]), "3 lengths or rewards came with 2 trajectories"),
        (GroupInputs(parts=[(1.0, [1.0])]), "1 lengths or rewards came with 2 trajectories"),
    ],
)
def test_inputs_must_fit_the_group(inputs: GroupInputs, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages([1.0, 0.0], [True] * 2, Opo(), inputs)


def test_pass_at_k_on_hand_computed_numbers() -> None:
    # One of four passes, subsets of two: R = 1 - C(3,2)/C(4,2) = 1/2, σ = 1/2. Of a failing
    # trajectory's three subsets, one passes: (1/3 - 1/2) / (1/2) = -1/3.
    advantage = PassAtK(pass_k=2, pass_threshold=1.0)
    found = group_advantages([0.0, 1.0, 0.5, 0.0], [True] * 4, advantage)
    assert found == pytest.approx([-1 / 3, 1.0, -1 / 3, -1 / 3], rel=1e-5)


def test_pass_at_1_is_grpo() -> None:
    rewards, usable = [1.0, 0.0, 0.0, 1.0, 1.0], [True] * 5
    assert group_advantages(rewards, usable, PassAtK(pass_k=1)) == pytest.approx(
        group_advantages(rewards, usable, Grpo())
    )


@pytest.mark.parametrize(("passed", "k"), [(0, 3), (6, 3), (4, 3), (2, 6), (2, 9)])
def test_pass_at_k_learns_nothing_where_every_or_no_subset_passes(passed: int, k: int) -> None:
    """With four of six, each three contain one that passes. With k of 6 or more, there is one
    subset."""
    rewards = [1.0] * passed + [0.0] * (6 - passed)
    found = group_advantages(rewards, [True] * 6, PassAtK(pass_k=k))
    assert found == [0.0] * 6


def test_pass_at_k_of_a_single_trajectory_is_zero() -> None:
    for reward in (0.0, 1.0):
        assert group_advantages([reward], [True], PassAtK(pass_k=2)) == [0.0]


def test_grpo_over_the_std_of_the_step() -> None:
    # Two groups: 0, 1 and 3, 3. Over the step: mean 1.75, std sqrt(6.75 / 4).
    groups = [[0.0, 1.0], [3.0, 3.0]]
    centered = [
        value
        for rewards in groups
        for value in group_advantages(rewards, [True] * 2, GrpoBatchStd())
    ]
    std = math.sqrt((1.75**2 + 0.75**2 + 2 * 1.25**2) / 4)
    assert over_std(centered, [0.0, 1.0, 3.0, 3.0]) == pytest.approx(
        [-0.5 / std, 0.5 / std, 0.0, 0.0], rel=1e-5
    )
    assert over_std([0.0, 0.0], [2.0, 2.0]) == [0.0, 0.0]


def test_gdpo_normalizes_each_reward_function_in_its_group() -> None:
    """The sums 1 and 2 of the first two trajectories differ by one function; grpo of the sums would
    mix both scales."""
    correct, short = [1.0, 1.0, 0.0, 0.0], [0.0, 100.0, 0.0, 100.0]
    inputs = GroupInputs(parts=[(1.0, correct), (0.5, short), (0.0, [None] * 4)])
    found = group_advantages([1.0, 51.0, 0.0, 50.0], [True] * 4, Gdpo(), inputs)
    assert found == pytest.approx([0.5, 1.5, -1.5, -0.5], rel=1e-5)
    std = math.sqrt((2 * 0.5**2 + 2 * 1.5**2) / 4)
    assert normalized([value or 0.0 for value in found], [1] * 4) == pytest.approx(
        [0.5 / std, 1.5 / std, -1.5 / std, -0.5 / std], rel=1e-5
    )


def test_gdpo_learns_where_equal_totals_hide_different_parts() -> None:
    inputs = GroupInputs(parts=[(1.0, [1.0, 0.0, 5.0]), (2.0, [0.0, 0.5, 5.0])])
    found = group_advantages([1.0, 1.0, None], [True, True, False], Gdpo(), inputs)
    assert found == [pytest.approx(-1.0, rel=1e-5), pytest.approx(1.0, rel=1e-5), None]
    equal = GroupInputs(parts=[(1.0, [0.3, 0.3])])
    assert group_advantages([0.3, 0.3], [True] * 2, Gdpo(), equal) == pytest.approx([0.0] * 2)


def test_reinforce_plus_plus_is_normalized_over_the_step() -> None:
    assert group_advantages([1.0, 3.0], [True] * 2, ReinforcePlusPlus()) == [1.0, 3.0]
    assert group_advantages([1.0, 3.0], [True] * 2, ReinforcePlusPlusBaseline()) == [-1.0, 1.0]
    # Over tokens: 1 once, 4 three times (mean 3.25, variance (2.25² + 3 · 0.75²) / 4).
    std = math.sqrt((2.25**2 + 3 * 0.75**2) / 4)
    assert normalized([1.0, 4.0], [1, 3]) == pytest.approx([-2.25 / std, 0.75 / std], rel=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1e4, 1e9])
def test_advantages_far_from_zero_are_standardized(offset: float) -> None:
    """E[v²] - E[v]² would lose the std of values around 1e9."""
    values = np.random.default_rng(0).integers(-8, 9, 60).astype(np.float64) * 64
    found = standardized(values[:17] + offset, values + offset)
    expected = (values - values.mean()) / (values.std() + 1e-6)
    np.testing.assert_allclose(found, expected[:17], rtol=1e-6)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_grpo_divides_by_the_std_of_the_population(n: int) -> None:
    """The result is sqrt(n / (n - 1)) times that of verl and TRL, as in
    docs/how_to/coming_from.md."""
    rewards = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    theirs = (rewards - rewards.mean()) / rewards.std()
    ours = group_advantages(rewards.tolist(), [True] * n, Grpo())
    assert ours == pytest.approx((theirs * math.sqrt(n / (n - 1))).tolist(), rel=1e-4)


def test_soft_overlong_penalty_falls_linearly() -> None:
    assert [
        Overlong(buffer=20, penalty=0.5).added(tokens, 100) for tokens in (10, 80, 90, 100)
    ] == [
        0.0,
        0.0,
        -0.25,
        -0.5,
    ]


def test_masked_trajectories_do_not_enter_the_statistics() -> None:
    assert group_advantages([1.0, None, 0.0, 100.0], [True, False, True, False], DrGrpo()) == [
        0.5,
        None,
        -0.5,
        None,
    ]


def test_equal_rewards_give_zero() -> None:
    assert group_advantages([0.3] * 5, [True] * 5, Grpo()) == pytest.approx([0.0] * 5, abs=1e-9)


def test_no_usable_trajectory() -> None:
    assert group_advantages([None, 1.0], [False, False], Grpo()) == [None, None]


@pytest.mark.parametrize("seed", range(3))
def test_against_numpy(seed: int) -> None:
    rewards = np.random.default_rng(seed).standard_normal(8)
    expected = (rewards - np.mean(rewards)) / (
        np.sqrt(np.mean((rewards - np.mean(rewards)) ** 2)) + 1e-6
    )
    np.testing.assert_allclose(
        group_advantages(rewards.tolist(), [True] * 8, Grpo()), expected, rtol=1e-12
    )


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="one flag"):
        group_advantages([1.0], [True, True], Grpo())
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, float("nan")], [True, True], Grpo())
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, None], [True, True], Grpo())
