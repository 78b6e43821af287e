"""Common prefixes of rows become segments, and each row can be read back from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from asyncrl.models.forest import ROOT, Forest, separate_rows, shared_rows

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=20)
"""Few different tokens, so that most rows have prefixes in common."""


def arrays(*rows: list[int] | range) -> list[np.ndarray]:
    return [np.array(row, dtype=np.int64) for row in rows]


def packed(forest: Forest, rows: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(
        [
            rows[row][depth : depth + length]
            for (row, depth), length in zip(forest.origins, forest.lengths, strict=True)
        ]
    )


@settings(deadline=None, derandomize=True)
@given(ROWS)
def test_every_row_can_be_read_back(lists: list[list[int]]) -> None:
    rows = arrays(*lists)
    for forest in (shared_rows(rows), separate_rows(rows)):
        tokens = packed(forest, rows)
        assert len(tokens) == forest.tokens and min(forest.lengths) > 0
        for number, row in enumerate(rows):
            for first in range(len(row) + 1):
                assert tokens[forest.positions(number, first)].tolist() == row[first:].tolist()
        followed = [ROOT]
        for segment, parent in enumerate(forest.parents):
            assert parent in followed, "a segment follows what it continues"
            followed = [*followed[: followed.index(parent) + 1], segment]


@settings(deadline=None, derandomize=True)
@given(ROWS)
def test_no_prefix_is_computed_twice_if_that_saves_much(lists: list[list[int]]) -> None:
    rows = arrays(*lists)
    prefixes = {tuple(row[:end]) for row in lists for end in range(1, len(row) + 1)}
    assert len(prefixes) <= shared_rows(rows).tokens <= len(prefixes) * 1.1 + 1
    assert separate_rows(rows).tokens == sum(map(len, rows))


def test_a_group_of_siblings_by_hand() -> None:
    rows = arrays([5, 6, 7, 1], [9, 9, 9, 9, 9, 9], [5, 6, 7, 2, 2], [5, 6, 7, 1], [5, 6, 7])
    forest = shared_rows(rows)
    # 5 6 7 with the branches 2 2 and 1, of 6 tokens. The row of nines has as many.
    assert forest.lengths == (6, 3, 2, 1) and forest.parents == (ROOT, ROOT, 1, 1)
    assert forest.ends == (3, 0, 2, 3, 1) and forest.depths == (0, 0, 3, 3)
    assert forest.positions(2, 2).tolist() == [8, 9, 10] and forest.positions(4, 3).tolist() == []


def test_rows_without_a_common_prefix_are_ordered_by_length() -> None:
    rows = arrays(range(3, 6), range(4, 9), range(5, 8))
    assert shared_rows(rows) == separate_rows(rows)
    assert shared_rows(rows).lengths == (5, 3, 3) and shared_rows(rows).ends == (1, 0, 2)


def test_one_common_word_of_long_rows_is_no_segment() -> None:
    long = [[1, *range(first, first + 60)] for first in (100, 200, 300)]
    assert shared_rows(arrays(*long)).lengths == (61, 61, 61)
    short = [[1, *range(first, first + 6)] for first in (100, 200, 300)]
    assert shared_rows(arrays(*short)).lengths == (1, 6, 6, 6)


@pytest.mark.parametrize("width", [1, 3])
def test_a_long_chain_of_branches_needs_no_recursion(width: int) -> None:
    stem = np.arange(10, 10 + 3000 * width)
    rows = [
        np.append(stem[: width * count], number)
        for count in range(1, 3000)
        for number in range(1, 3)
    ]
    forest = shared_rows(rows)
    assert forest.tokens < sum(map(len, rows)) / 40
    assert packed(forest, rows)[forest.positions(5997, 0)].tolist() == rows[5997].tolist()
