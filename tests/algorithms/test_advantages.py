import math

import numpy as np
import pytest

from asyncrl.algorithms.advantages import group_advantages


def test_grpo_on_hand_computed_numbers() -> None:
    # mean 1, deviations -1, 0, 1, 0; population std sqrt(2 / 4)
    std = math.sqrt(0.5)
    assert group_advantages([0.0, 1.0, 2.0, 1.0], [True] * 4, "grpo") == pytest.approx([-1 / (std + 1e-6), 0, 1 / (std + 1e-6), 0])


def test_dr_grpo_on_hand_computed_numbers() -> None:
    assert group_advantages([0.0, 1.0, 2.0, 2.0], [True] * 4, "dr_grpo") == pytest.approx([-1.25, -0.25, 0.75, 0.75])


def test_masked_trajectories_have_no_part_in_the_statistics() -> None:
    assert group_advantages([1.0, None, 0.0, 100.0], [True, False, True, False], "dr_grpo") == [0.5, None, -0.5, None]


def test_equal_rewards_give_zero() -> None:
    assert group_advantages([0.3] * 5, [True] * 5, "grpo") == pytest.approx([0.0] * 5, abs=1e-9)


def test_no_usable_trajectory() -> None:
    assert group_advantages([None, 1.0], [False, False], "grpo") == [None, None]


@pytest.mark.parametrize("seed", range(3))
def test_against_numpy(seed: int) -> None:
    rewards = np.random.default_rng(seed).standard_normal(8)
    expected = (rewards - np.mean(rewards)) / (np.sqrt(np.mean((rewards - np.mean(rewards)) ** 2)) + 1e-6)
    np.testing.assert_allclose(group_advantages(rewards.tolist(), [True] * 8, "grpo"), expected, rtol=1e-12)


def test_what_cannot_be_used_is_refused() -> None:
    with pytest.raises(ValueError, match="one flag"):
        group_advantages([1.0], [True, True], "grpo")
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, float("nan")], [True, True], "grpo")
    with pytest.raises(ValueError, match="finite"):
        group_advantages([1.0, None], [True, True], "grpo")
    with pytest.raises(ValueError, match="'gae'"):
        group_advantages([1.0, 2.0], [True, True], "gae")  # type: ignore[arg-type]
