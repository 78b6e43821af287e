"""Best-fit decreasing compared with a row-by-row implementation, the three strategies, and the
cap."""

from __future__ import annotations

from itertools import count, pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from asyncrl.learning.packing.prefixes import pack_shared, row_tokens, shared_units
from asyncrl.learning.packing.strategies import (
    Pieces,
    Strategy,
    Units,
    _fills,
    best_fit_decreasing,
    pack,
    pack_rows,
)
from asyncrl.models.forest import shared_rows
from asyncrl.models.micro_batches import micro_batch, token_example


def rows_of(lengths: list[int]) -> list[np.ndarray]:
    """Rows of these lengths without a common prefix."""
    return [np.full(length, index) for index, length in enumerate(lengths)]


LENGTHS = st.integers(1, 300).flatmap(
    lambda cap: st.tuples(st.lists(st.integers(1, cap), max_size=150), st.just(cap))
)


def row_by_row(lengths: list[int], capacity: int) -> list[int]:
    """Best-fit decreasing, one row at a time. Returns the tokens in each bin."""
    fills: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [bin for bin, fill in enumerate(fills) if fill + length <= capacity]
        if fitting:
            fills[max(fitting, key=lambda bin: fills[bin])] += length
        else:
            fills.append(length)
    return sorted(fills)


def bins_of(pieces: Pieces) -> list[list[tuple[int, int, int]]]:
    whole = list(zip(pieces.row.tolist(), pieces.start.tolist(), pieces.end.tolist(), strict=True))
    return [whole[at:to] for at, to in pairwise(pieces.offsets)]


def test_best_fit_decreasing_by_hand() -> None:
    # 7 and 6 open bins. 4 joins 6, the fullest bin with room. 3 joins 7. Both bins are full.
    plan = pack([3, 7, 4, 6], 10)
    assert plan.micro_batches == (((1, 0), (3, 2)),)
    assert plan.fill == 1.0 and plan.imbalance == 0.0


@settings(deadline=None, derandomize=True)
@given(LENGTHS)
@example(([3, 3, 3, 3, 3, 2, 2, 1], 10))
@example(([70_000, 40_000, 30_000, 30_000, 1], 70_000))  # lengths of more than 16 bits
def test_the_same_fills_as_row_by_row(case: tuple[list[int], int]) -> None:
    lengths, capacity = case
    order, offsets = best_fit_decreasing(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    bins = [order[at:to].tolist() for at, to in pairwise(offsets)]
    assert sorted(sum(lengths[row] for row in rows) for rows in bins) == row_by_row(
        lengths, capacity
    )
    assert all(rows == sorted(rows, key=lambda row: -lengths[row]) for rows in bins)


@pytest.mark.parametrize("seed", range(5))
def test_the_same_fills_as_row_by_row_with_many_rows(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = np.clip(generator.lognormal(np.log(64), 0.8, 3000), 1, 768).astype(np.int64)
    order, offsets = best_fit_decreasing(lengths, 1024)
    assert sorted(np.add.reduceat(lengths[order], offsets[:-1]).tolist()) == row_by_row(
        lengths.tolist(), 1024
    )


def test_ties_are_broken_by_index() -> None:
    order, offsets = best_fit_decreasing(np.array([2, 3, 2, 3, 2]), 5)
    assert order.tolist() == [1, 0, 3, 2, 4] and offsets.tolist() == [0, 2, 4, 5]


def test_python_work_does_not_grow_with_the_rows() -> None:
    counts = np.random.default_rng(0).integers(1, 100, 512).tolist()
    few, many = (
        len(
            _fills(
                [
                    (length, times * count)
                    for length, count in zip(range(512, 0, -1), counts, strict=True)
                ],
                512,
            )
        )
        for times in (1, 10_000)
    )
    assert 512 <= few <= 512 * 10 and many <= 512 * 10


def test_strategies_by_hand() -> None:
    assert bins_of(pack_rows([5, 2, 3, 1], 5)) == [[(0, 0, 5)], [(2, 0, 3), (1, 0, 2)], [(3, 0, 1)]]
    assert bins_of(pack_rows([5, 2, 3, 1], 4, "bfd_split")) == [
        [(0, 0, 4)],
        [(2, 0, 3), (0, 4, 5)],
        [(1, 0, 2), (3, 0, 1)],
    ]
    assert bins_of(pack_rows([5, 2, 3, 1], 4, "wrapped")) == [
        [(0, 0, 4)],
        [(0, 4, 5), (1, 0, 2), (2, 0, 1)],
        [(2, 1, 3), (3, 0, 1)],
    ]
    assert (
        bins_of(pack_rows([9], 4, "wrapped"))
        == bins_of(pack_rows([9], 4, "bfd_split"))
        == [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 9)]]
    )


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_no_rows_give_no_bins(strategy: Strategy) -> None:
    pieces = pack_rows([], 4, strategy)
    assert pieces.row.size == 0 and pieces.offsets.tolist() == [0]


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 60), max_size=60),
    st.integers(1, 25),
    st.sampled_from(["bfd_split", "wrapped"]),
)
def test_cut_rows_keep_every_token_once_under_the_cap(
    lengths: list[int], capacity: int, strategy: Strategy
) -> None:
    bins = bins_of(pack_rows(lengths, capacity, strategy))
    tokens = [
        (row, token) for pieces in bins for row, start, end in pieces for token in range(start, end)
    ]
    every = [(row, token) for row, length in enumerate(lengths) for token in range(length)]
    assert sorted(tokens) == every
    fills = [sum(end - start for _, start, end in pieces) for pieces in bins]
    assert all(0 < fill <= capacity for fill in fills)
    if strategy == "wrapped":
        assert tokens == every and all(fill == capacity for fill in fills[:-1])
    else:
        cut = [
            min(capacity, length - start)
            for length in lengths
            for start in range(0, length, capacity)
        ]
        assert sorted(fills) == row_by_row(cut, capacity)


def test_invalid_rows_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"row 1 has 11 tokens, above the capacity of 10; truncate it, .* packing_strategy:"
            r" bfd_split"
        ),
    ):
        pack_rows([3, 11], 10)
    with pytest.raises(ValueError, match="row 2 has 0 tokens; leave it out"):
        pack_rows([3, 1, 0], 10, "wrapped")
    with pytest.raises(ValueError, match="a capacity of 0"):
        pack_rows([3], 0, "wrapped")
    with pytest.raises(ValueError, match="trajectory 1 has 11 tokens, not 1 to 10"):
        pack([3, 11], 10)


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, 50), max_size=80),
    st.integers(50, 120),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.003, 1.0]),
)
def test_every_trajectory_once_under_the_cap(
    lengths: list[int], cap: int, world_size: int, quadratic: float
) -> None:
    plan = pack(lengths, cap, world_size, quadratic)
    assert plan == pack(list(lengths), cap, world_size, quadratic)
    assert len(plan.micro_batches) == world_size
    assert len({len(micro_batches) for micro_batches in plan.micro_batches}) == 1
    placed = [
        index for micro_batches in plan.micro_batches for items in micro_batches for index in items
    ]
    assert sorted(placed) == list(range(len(lengths)))
    assert all(
        sum(lengths[index] for index in items) <= cap
        for micro_batches in plan.micro_batches
        for items in micro_batches
    )
    assert plan.fill == pytest.approx(sum(lengths) / (cap * sum(map(len, plan.micro_batches))))
    assert 0 <= plan.imbalance <= world_size - 1 + 1e-9
    if world_size == 1:
        assert plan.imbalance == 0
        fills = sorted(sum(lengths[index] for index in items) for items in plan.micro_batches[0])
        assert fills == (row_by_row(lengths, cap) or [0])


UNITS = st.integers(4, 200).flatmap(
    lambda cap: st.tuples(
        st.lists(
            st.tuples(st.integers(1, cap // 2), st.integers(0, cap // 2)), min_size=1, max_size=60
        ),
        st.just(cap),
        st.integers(1, 4),
        st.sampled_from([0.0, 0.01]),
    )
)
"""Lengths of the two sides of each unit, 0 for a unit of a single trajectory; cap; ranks; cost."""


@settings(deadline=None, derandomize=True)
@given(UNITS)
@example(([(5, 5)] * 9, 10, 2, 0.0))  # bins that only hold one unit
@example(([(2, 2)] * 8, 100, 4, 0.01))  # one bin, split over four ranks
def test_a_unit_stays_together(case: tuple[list[tuple[int, int]], int, int, float]) -> None:
    sides, cap, ranks, quadratic = case
    lengths: list[int] = []
    units: list[tuple[int, ...]] = []
    for unit in sides:
        start = len(lengths)
        lengths += [length for length in unit if length]
        units.append(tuple(range(start, len(lengths))))
    plan = pack_shared(rows_of(lengths), cap, ranks, quadratic, units)
    micro_batches = [items for rank in plan.micro_batches for items in rank]
    assert sorted(item for items in micro_batches for item in items) == list(range(len(lengths)))
    for items in micro_batches:
        assert sum(lengths[item] for item in items) <= cap
        for unit in units:
            assert len(set(unit) & set(items)) in (0, len(unit))
    assert len({len(rank) for rank in plan.micro_batches}) == 1


def test_units_of_single_trajectories_change_nothing() -> None:
    lengths = [3, 7, 4, 6, 9, 1, 1]
    alone = [(index,) for index in range(len(lengths))]
    for ranks, quadratic in ((1, 0.0), (2, 0.1), (3, 0.0)):
        plan = pack(lengths, 10, ranks, quadratic)
        for units in (None, alone):
            assert pack_shared(rows_of(lengths), 10, ranks, quadratic, units) == plan


def test_a_unit_costs_as_much_as_its_trajectories() -> None:
    """Attention stays within a trajectory: 4 + 4 tokens cost 2 · (4 + 16), as much as 4 and 4."""
    plan = pack_shared(rows_of([4, 4, 4, 4]), 8, 2, 1.0, [(0, 1), (2,), (3,)])
    assert plan.imbalance == 0.0 and plan.tokens == 16
    assert sorted(map(sorted, (items for rank in plan.micro_batches for items in rank))) == [
        [0, 1],
        [2, 3],
    ]


def test_a_unit_above_the_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="the unit of trajectories 1, 2 has 11 tokens, not 1 to 1"):
        pack_shared(rows_of([3, 5, 6]), 10, units=[(0,), (1, 2)])
    with pytest.raises(ValueError, match="trajectory 0 has 11 tokens"):
        pack([11], 10)


def siblings(groups: int, prompt: int, answers: list[int]) -> list[np.ndarray]:
    """Groups of answers with these lengths to a prompt of `prompt` tokens."""
    number = count(groups)
    return [
        np.concatenate([np.full(prompt, group), np.full(answer, next(number))])
        for group in range(groups)
        for answer in answers
    ]


def units_of(
    rows: list[np.ndarray],
    limit: int,
    quadratic: float = 0.0,
    units: list[tuple[int, ...]] | None = None,
) -> Units:
    return shared_units(rows, shared_rows(rows), limit, quadratic, units)


def test_a_group_is_one_unit_that_has_its_prompt_once() -> None:
    units = units_of(siblings(2, 10, [3, 4, 5]), 100, 0.5)
    assert units.members == [(0, 1, 2), (3, 4, 5)]
    assert units.tokens.tolist() == [22, 22]
    # The prompt: 10². An answer of l tokens: l² + 2 · 10 · l.
    assert units.costs.tolist() == [22 + 0.5 * (100 + 9 + 60 + 16 + 80 + 25 + 100)] * 2


def test_a_group_above_the_cap_has_its_prompt_once_in_each_part() -> None:
    rows = siblings(1, 10, [6, 6, 6, 6, 6])
    units = units_of(rows, 22)
    assert sorted(map(len, units.members)) == [1, 2, 2]
    assert sorted(units.tokens.tolist()) == [16, 22, 22]
    plan = pack_shared(rows, 22)
    assert plan.tokens == 60 and sorted(sum(plan.micro_batches[0], ())) == [0, 1, 2, 3, 4]


def test_equal_rows_are_computed_once_and_a_row_may_begin_another() -> None:
    row = np.arange(8)
    units = units_of([row, row, row[:5]], 8)
    assert units.members == [(0, 1, 2)] and units.tokens.tolist() == [8]
    branching = [row[:5], np.append(row[:5], 9), row]
    with pytest.raises(ValueError, match="trajectory 2 has 8 tokens, not 1 to 7"):
        pack_shared(branching, 7)
    assert sorted(sum(units_of(branching, 7).members, ())) == [0, 1, 2]


def test_units_are_small_enough_for_several_ranks() -> None:
    # A group for each rank, or one group for both.
    for groups, tokens in ((2, 2 * 640), (1, 2 * 128 + 8 * 64)):
        plan = pack_shared(siblings(groups, 128, [64] * 8), 1000, 2)
        assert plan.tokens == tokens and plan.imbalance == 0.0 and plan.cost == tokens / 2
    # Three groups in two parts each: 3 · (128 + 4 · 64) for a rank instead of 2 · 640.
    plan = pack_shared(siblings(3, 128, [64] * 8), 10_000, 2)
    assert plan.tokens == 6 * 384 and plan.cost == 3 * 384


def test_pairs_with_one_context_stay_pairs() -> None:
    rows, pairs = siblings(1, 10, [5, 5, 5, 5]), [(0, 3), (1, 2)]
    units = units_of(rows, 34, units=pairs)
    assert units.members == [(0, 1, 2, 3)] and units.tokens.tolist() == [30]
    apart = units_of(rows, 25, units=pairs)
    assert apart.members == pairs and apart.tokens.tolist() == [20, 20]
    assert row_tokens(rows[:2]) == 20


def test_a_short_common_head_changes_neither_the_micro_batches_nor_their_number() -> None:
    """All chats of a model begin with the same tokens."""
    draw = np.random.default_rng(0)
    bodies = [
        np.append(index, draw.integers(1000, 9999, draw.integers(20, 900))) for index in range(200)
    ]
    separate = pack_shared(bodies, 2048)
    for head in (1, 5, 25):
        rows = [np.concatenate([np.full(head, 7), body]) for body in bodies]
        plan = pack_shared(rows, 2048 + head)
        assert len(plan.micro_batches[0]) <= len(separate.micro_batches[0]) + 2


def test_without_rows_every_rank_has_an_empty_micro_batch() -> None:
    plan = pack_shared([], 10, 3)
    assert plan == pack([], 10, 3) and plan.micro_batches == (((),),) * 3


def test_no_micro_batch_is_above_the_cap() -> None:
    """The prefixes that are worth a segment in the whole step may not be in a part of it."""
    draw = np.random.default_rng(0)
    for trial in range(60):
        head = draw.integers(0, 9999, draw.integers(1, 30))
        stems = [draw.integers(0, 9999, draw.integers(5, 60)) for _ in range(4)]
        rows = [
            np.concatenate([head, stems[draw.integers(4)], draw.integers(0, 9999, size)])
            for size in draw.integers(1, 200, 40)
        ]
        cap = int(draw.integers(300, 900))
        for ranks in (1, 3):
            plan = pack_shared(rows, cap, ranks, 0.001)
            for members in (items for rank in plan.micro_batches for items in rank if items):
                assert row_tokens([rows[member] for member in members]) <= cap, trial


def test_a_prefix_that_a_micro_batch_does_not_keep_counts_for_each_row() -> None:
    """All 20 rows have 22 tokens in common, and 18 of them three more. These three are a segment of
    the step. In a micro-batch of 19 rows they save too little, so each row has them itself."""
    number = count(1)

    def fresh(size: int) -> list[int]:
        return [next(number) for _ in range(size)]

    head, stem = fresh(22), fresh(3)
    rows = [head + stem + fresh(898) for _ in range(3)]
    rows += [head + stem + fresh(1) for _ in range(15)] + [head + fresh(384) for _ in range(2)]
    examples = [token_example((row[:22], row[22:])) for row in rows]
    plan = pack_shared([example.tokens for example in examples], 3184)
    batches = [micro_batch(examples, members, "cpu") for members in plan.micro_batches[0]]
    assert max(batch.input_ids.shape[1] for batch in batches) <= 3184
    assert sorted(member for batch in batches for member in batch.order) == [*range(20)]


def test_a_unit_that_fits_only_with_its_last_tokens_is_refused_by_name() -> None:
    """Without its last token, the second row saves too little of the first to be its prefix."""
    first = np.arange(320)
    rows = [first, first[:10]]
    with pytest.raises(ValueError, match="trajectories 0, 1 has 328 tokens, not 1 to 324"):
        pack_shared(rows, 324, units=[(0, 1)])
    assert pack_shared(rows, 328, units=[(0, 1)]).micro_batches == (((0, 1),),)


@pytest.mark.parametrize(("context", "pairs", "cap"), [(1000, 16, 2048), (96, 28, 2048)])
def test_pairs_with_one_context_fill_micro_batches(context: int, pairs: int, cap: int) -> None:
    """They need as many micro-batches as the same rows without pairs."""
    draw = np.random.default_rng(0)
    head = draw.integers(0, 9999, context)
    sides = [
        np.concatenate([head, draw.integers(0, 9999, size)])
        for size in draw.integers(20, 140, 2 * pairs)
    ]
    units = [(2 * pair, 2 * pair + 1) for pair in range(pairs)]
    together, single = pack_shared(sides, cap, units=units), pack_shared(sides, cap)
    assert len(together.micro_batches[0]) == len(single.micro_batches[0])
    for members in together.micro_batches[0]:
        assert all((first in members) == (second in members) for first, second in units)
        assert row_tokens([sides[member] for member in members]) <= cap


def test_a_row_without_tokens_is_named() -> None:
    for rows in ([[], [1, 2]], [[], []]):
        with pytest.raises(ValueError, match="trajectory 0 has 0 tokens"):
            pack_shared([np.array(row, dtype=np.int64) for row in rows], 10)


@settings(deadline=None, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=10), max_size=30),
    st.integers(10, 60),
    st.integers(1, 4),
)
def test_each_row_is_in_one_unit_whose_tokens_are_those_of_its_row(
    lists: list[list[int]], cap: int, ranks: int
) -> None:
    rows = [np.array(row) for row in lists]
    plan = pack_shared(rows, cap, ranks, 0.25)
    assert sorted(sum((sum(items, ()) for items in plan.micro_batches), ())) == [*range(len(rows))]
    assert plan.tokens <= sum(map(len, rows))
    if not rows:
        return
    units = units_of(rows, cap, 0.25)
    assert sorted(sum(units.members, ())) == list(range(len(rows)))
    for members, tokens, cost in zip(units.members, units.tokens, units.costs, strict=True):
        assert row_tokens([rows[member] for member in members]) <= tokens <= cap
        assert tokens <= cost <= tokens + 0.25 * tokens**2
