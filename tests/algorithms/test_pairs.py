"""Pairs of a group: every small group by enumeration, ties, margins, unusable trajectories."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations, product

import pytest

from asyncrl.algorithms.pairs import (
    BestWorst,
    Candidates,
    Margin,
    choose_pairs,
    shuffled_rewards,
)

BEST_WORST, MARGIN = BestWorst(), Margin(max_pairs=100)


def group(*rewards: float | None, **changes: tuple[object, ...]) -> Candidates:
    """Trajectories with these rewards, usable, finished and different."""
    places = range(len(rewards))
    known = Candidates(rewards, [True] * len(rewards), [False] * len(rewards), list(places))
    return replace(known, **changes)


@pytest.mark.parametrize("rewards", list(product([0.0, 0.5, 1.0], repeat=3)))
def test_every_group_of_three(rewards: tuple[float, ...]) -> None:
    """`margin` gives exactly the ordered pairs, best first, and `best_worst` the first of them."""
    expected = {
        (chosen, rejected)
        for chosen, rejected in permutations(range(3), 2)
        if rewards[chosen] > rewards[rejected]
    }
    found = choose_pairs(group(*rewards), MARGIN)
    assert set(found) == expected and len(found) == len(expected)
    margins = [rewards[chosen] - rewards[rejected] for chosen, rejected in found]
    assert margins == sorted(margins, reverse=True)
    assert choose_pairs(group(*rewards), BEST_WORST) == found[:1]


def test_the_first_of_equal_rewards_counts() -> None:
    assert choose_pairs(group(0.0, 1.0, 1.0, 0.0), BEST_WORST) == [(1, 0)]
    two = Margin(max_pairs=2)
    assert choose_pairs(group(0.0, 1.0, 1.0, 0.0), two) == [(1, 0), (1, 3)]


@pytest.mark.parametrize("spec", [BEST_WORST, MARGIN])
@pytest.mark.parametrize(
    "candidates",
    [
        group(),
        group(1.0),
        group(1.0, 1.0, 1.0),
        group(1.0, None),
        group(1.0, math.nan),
        group(1.0, -math.inf),
        group(1.0, 0.0, usable=(True, False)),
        group(1.0, 0.0, completions=("same", "same")),
    ],
)
def test_groups_without_a_pair(candidates: Candidates, spec: BestWorst | Margin) -> None:
    assert choose_pairs(candidates, spec) == []


@pytest.mark.parametrize("spec", [BEST_WORST, MARGIN])
def test_what_cannot_be_used_is_left_out(spec: BestWorst | Margin) -> None:
    rewards = (math.nan, 0.2, 9.0, None, 0.7, math.inf)
    usable = (True, True, False, True, True, True)
    assert choose_pairs(group(*rewards, usable=usable), spec) == [(4, 1)]


@pytest.mark.parametrize(
    "spec", [BestWorst(min_margin=0.25), Margin(min_margin=0.25, max_pairs=100)]
)
def test_rewards_differ_by_at_least_the_margin(spec: BestWorst | Margin) -> None:
    def pairs(*rewards: float) -> list[tuple[int, int]]:
        return choose_pairs(group(*rewards), spec)

    assert pairs(0.5, 0.26, 0.3) == []
    assert pairs(0.5, 0.25) == [(0, 1)]
    assert len(pairs(0.0, 0.25, 0.5)) == (1 if spec.name == "best_worst" else 3)


def test_rounding_of_float32_does_not_decide() -> None:
    """0.4 - 0.3 in float32 is 0.09999999."""
    low, high = 0.30000001192092896, 0.4000000059604645
    assert high - low < 0.1
    assert choose_pairs(group(low, high), BestWorst(min_margin=0.1)) == [(1, 0)]
    assert choose_pairs(group(low, high), BestWorst(min_margin=0.1001)) == []
    assert choose_pairs(group(5e6, 5e6), BEST_WORST) == []


@pytest.mark.parametrize("spec", [BEST_WORST, MARGIN])
def test_a_completion_that_was_cut_off_loses_reward(spec: BestWorst | Margin) -> None:
    penalized = spec.model_copy(update={"missing_eos_penalty": 0.5})
    candidates = group(1.0, 1.0, truncated=(True, False))
    assert choose_pairs(candidates, spec) == []
    assert choose_pairs(candidates, penalized) == [(1, 0)]
    candidates = group(1.0, 0.7, truncated=(True, False))
    assert choose_pairs(candidates, penalized) == [(1, 0)]
    both = group(1.0, 0.7, truncated=(True, True))
    assert choose_pairs(both, penalized) == [(0, 1)]


def test_at_most_max_pairs_the_largest_margins_first() -> None:
    found = choose_pairs(group(0.0, 3.0, 1.0, 7.0), Margin(max_pairs=3))
    assert found == [(3, 0), (3, 2), (3, 1)]


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lengths \[1, 2\]; give one item for each trajectory"):
        choose_pairs(group(1.0, 0.0, usable=(True,)), BEST_WORST)


def test_shuffling_permutes_the_usable_rewards_of_the_step() -> None:
    rewards = [[0.0, 1.0, None], [2.0, 3.0, 4.0]]
    usable = [[True, True, False], [True, False, True]]
    shuffled = [shuffled_rewards(rewards, usable, (7, version)) for version in range(20)]
    assert shuffled == [shuffled_rewards(rewards, usable, (7, version)) for version in range(20)]
    assert rewards == [[0.0, 1.0, None], [2.0, 3.0, 4.0]], "the arguments stay as they are"
    for (first, second, masked), (third, unusable, last) in shuffled:
        assert masked is None and unusable == 3.0
        assert sorted([first, second, third, last]) == [0.0, 1.0, 2.0, 4.0]
    assert len({str(one) for one in shuffled}) > 5
