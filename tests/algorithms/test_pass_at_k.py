"""pass@k on known values, and compared with an enumeration of all subsets."""

from itertools import combinations

import pytest

from asyncrl.algorithms.pass_at_k import pass_at_k


@pytest.mark.parametrize(
    ("n", "passed", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (4, 2, 2, 5 / 6),
        (4, 3, 2, 1.0),
        (10, 3, 5, 11 / 12),
        (200, 1, 100, 0.5),
        (200, 0, 200, 0.0),
    ],
)
def test_constants(n, passed, k, expected):
    assert pass_at_k(n, passed, k) == expected


@pytest.mark.parametrize("n", [1, 2, 5, 7])
def test_it_is_the_share_of_subsets_with_a_sample_that_passes(n):
    for passed in range(n + 1):
        samples = [True] * passed + [False] * (n - passed)
        for k in range(1, n + 1):
            drawn = [any(subset) for subset in combinations(samples, k)]
            assert pass_at_k(n, passed, k) == sum(drawn) / len(drawn)


def test_few_passing_samples_of_many_lose_no_digits():
    """A product of floats, 1 - (1 - 1e-4)..., is wrong in its last digits. Integer arithmetic gives
    the nearest float."""
    assert pass_at_k(10_000, 1, 1) == 1e-4
    assert pass_at_k(1000, 999, 1) == 0.999


@pytest.mark.parametrize(
    ("n", "passed", "k"), [(4, 1, 0), (4, 1, 5), (0, 0, 1), (4, 5, 1), (4, -1, 1)]
)
def test_invalid_counts_are_refused(n, passed, k):
    with pytest.raises(ValueError, match="samples"):
        pass_at_k(n, passed, k)
