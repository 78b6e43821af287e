import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.data.packing import pack


def test_best_fit_decreasing_by_hand() -> None:
    # 7 | 6 | 4 goes to 6 (the fuller one with room) | 3 goes to 7: both full.
    plan = pack([3, 7, 4, 6], 10)
    assert plan.micro_batches == (((1, 0), (3, 2)),)
    assert plan.fill == 1.0


def test_ranks_get_equally_many_and_similar_rounds() -> None:
    plan = pack([5, 5, 5, 5, 5, 5], 10, world_size=2)
    assert [len(micro_batches) for micro_batches in plan.micro_batches] == [2, 2]
    assert sorted(index for rank in plan.micro_batches for items in rank for index in items) == list(range(6))


def test_one_micro_batch_is_halved_for_two_ranks() -> None:
    assert pack([4, 3, 2, 1], 10, world_size=2).micro_batches == (((0, 3),), ((1, 2),))


def test_fewer_trajectories_than_ranks_leave_empty_micro_batches() -> None:
    assert pack([4], 10, world_size=3).micro_batches == (((0,),), ((),), ((),))


def test_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="trajectory 1 has 11 tokens"):
        pack([3, 11], 10)


@given(st.lists(st.integers(1, 50), max_size=80), st.integers(50, 120), st.integers(1, 4))
def test_every_trajectory_once_under_the_cap(lengths: list[int], cap: int, world_size: int) -> None:
    plan = pack(lengths, cap, world_size)
    assert plan == pack(list(lengths), cap, world_size)
    assert len(plan.micro_batches) == world_size
    assert len({len(micro_batches) for micro_batches in plan.micro_batches}) == 1
    placed = [index for micro_batches in plan.micro_batches for items in micro_batches for index in items]
    assert sorted(placed) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in items) <= cap for micro_batches in plan.micro_batches for items in micro_batches)
    if world_size == 1 and lengths:
        # Best fit never leaves two micro-batches that would fit into one.
        sizes = sorted(sum(lengths[index] for index in items) for items in plan.micro_batches[0])
        assert len(sizes) < 2 or sizes[0] + sizes[1] > cap
