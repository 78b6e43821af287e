"""Ranks get similar costs at the same time: rounds, the largest differencing method, and the
quadratic term."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from asyncrl.learning.packing.balance import (
    balanced_rounds,
    imbalance_of,
    karmarkar_karp,
    quadratic_cost,
)
from asyncrl.learning.packing.strategies import best_fit_decreasing, pack


def test_the_differencing_method_by_hand() -> None:
    # 8 - 7 = 1 and 6 - 5 = 1. Then 4 - 1 = 3 and 3 - 1 = 2, which gives {8, 6} and {7, 5, 4}.
    assert sorted(sorted(part) for part in karmarkar_karp([8, 7, 6, 5, 4], 2)) == [
        [0, 2],
        [1, 3, 4],
    ]
    assert sorted(
        sum([8, 7, 6, 5, 4, 3][at] for at in part) for part in karmarkar_karp([8, 7, 6, 5, 4, 3], 3)
    ) == [11, 11, 11]


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(0.1, 1e6), max_size=60), st.integers(1, 9))
def test_parts_contain_every_index_once_and_differ_by_at_most_the_largest(
    costs: list[float], parts: int
) -> None:
    found = karmarkar_karp(costs, parts)
    assert len(found) == parts and sorted(at for part in found for at in part) == list(
        range(len(costs))
    )
    sums = [sum(costs[at] for at in part) for part in found]
    assert max(sums) - min(sums) <= max(costs, default=0) * (1 + 1e-9)
    assert len(costs) < parts or parts > 2 or all(found)


def test_ranks_get_equally_many_and_similar_rounds() -> None:
    plan = pack([5, 5, 5, 5, 5, 5], 10, world_size=2)
    assert [len(micro_batches) for micro_batches in plan.micro_batches] == [2, 2]
    assert sorted(
        index for rank in plan.micro_batches for items in rank for index in items
    ) == list(range(6))
    assert plan.imbalance == 0


def test_one_micro_batch_is_halved_for_two_ranks() -> None:
    assert pack([4, 3, 2, 1], 10, world_size=2).micro_batches == (((0, 3),), ((1, 2),))


def test_fewer_trajectories_than_ranks_leave_empty_micro_batches() -> None:
    plan = pack([4], 10, world_size=3)
    assert plan.micro_batches == (((0,),), ((),), ((),))
    assert plan.imbalance == 2, "one rank works, three wait"
    assert pack([], 10, world_size=2).micro_batches == (((),), ((),))


def test_a_round_is_distributed_again_by_cost() -> None:
    """By tokens, 8 and 4 + 4 are equal. With a term of l², 64 exceeds 32, so the round becomes
    8 | 4 4 2 2 if that costs less."""
    lengths, quadratic = [8, 4, 4, 2, 2], 1.0
    costs = [length + quadratic * length**2 for length in lengths]
    before = [[0, 3], [1, 2, 4]]
    (after,) = balanced_rounds(before, lengths, costs, 16, 2)
    assert after == [[0], [1, 2, 3, 4]]
    assert imbalance_of([after], costs) == pytest.approx(72 / 62 - 1) and imbalance_of(
        [before], costs
    ) == pytest.approx(78 / 62 - 1)
    assert balanced_rounds(before, lengths, costs, 11, 2) == [[[0, 3], [1, 2, 4]]], (
        "12 tokens would break the cap"
    )


def test_costs_of_lognormal_lengths_are_nearly_even_over_ranks() -> None:
    """Compared with the same micro-batches in rounds by tokens. The quadratic cost is 20% at 2,000
    tokens."""
    lengths = (
        np.clip(np.random.default_rng(1).lognormal(np.log(200), 1.0, 400), 1, 2000)
        .astype(int)
        .tolist()
    )
    quadratic = 1e-4
    costs = [length + quadratic * length**2 for length in lengths]
    order, offsets = best_fit_decreasing(np.array(lengths), 4096)
    bins = [order[at:to].tolist() for at, to in pairwise(offsets)]
    by_tokens = sorted(bins, key=lambda items: -sum(lengths[item] for item in items))
    naive = imbalance_of([by_tokens[at : at + 4] for at in range(0, len(bins), 4)], costs)
    plan = pack(lengths, 4096, 4, quadratic)
    assert len(plan.micro_batches[0]) * 4 == -(-len(bins) // 4) * 4
    assert plan.imbalance < 0.01 and naive > 0.03


def test_the_quadratic_term_is_the_ratio_of_flops() -> None:
    # 12 layers, 16 heads of 64, 0.2 B parameters: at 1,000 tokens, 2 * 12 * 1024 * 1000 FLOPs of
    # attention against 2 * 0.2e9.
    assert quadratic_cost(12, 16, 64, 200_000_000) * 1000 == pytest.approx(
        (2 * 12 * 1024 * 1000) / (2 * 0.2e9)
    )
