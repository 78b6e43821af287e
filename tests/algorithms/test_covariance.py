"""Which tokens Clip-Cov and KL-Cov select, on hand-computed numbers, and that the covariance is the
entropy's first-order change."""

import numpy as np
import pytest
import torch

from asyncrl.algorithms.covariance import covariances, drawn_between, largest


def test_covariances_on_hand_computed_numbers() -> None:
    # Means -2 and 1; deviations (1, 0, -1) and (2, -1, -1).
    found = covariances(np.array([-1.0, -2.0, -3.0]), np.array([3.0, 0.0, 0.0]))
    assert found.tolist() == [2.0, 0.0, 1.0]
    assert covariances(np.zeros(0), np.zeros(0)).shape == (0,)
    assert covariances(np.array([-1.0, -4.0]), np.array([0.5, 0.5])).tolist() == [0.0, 0.0]


def test_a_step_along_the_advantage_lowers_the_entropy_by_the_covariance() -> None:
    """For a softmax policy whose logits move by ε·A, dH/dε = -Cov(log π, A) under π (theorem 1 of
    the paper). The tokens here appear as often as π says."""
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64))
    advantages = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)

    def entropy(step: float) -> float:
        logprobs = (logits + step * advantages).log_softmax(0)
        return -float((logprobs.exp() * logprobs).sum())

    counts = [5, 3, 2]
    values = covariances(np.repeat(logits.numpy(), counts), np.repeat(advantages.numpy(), counts))
    slope = (entropy(1e-5) - entropy(-1e-5)) / 2e-5
    assert slope == pytest.approx(-values.mean(), rel=1e-8) and abs(slope) > 0.01


def test_the_largest_share_is_at_least_one_token() -> None:
    values = np.array([0.5, 3.0, -9.0, 3.0, 1.0])
    assert largest(values, 0.5).tolist() == [False, True, False, True, False]
    assert largest(values, 1e-9).tolist() == [False, True, False, False, False]
    assert largest(values, 1.0).all() and not largest(np.zeros(0), 0.5).any()


def test_tokens_are_drawn_between_the_bounds_and_not_from_excluded_ones() -> None:
    values = np.array([1.0, 1.5, 2.0, 4.9, 5.0, 3.0])
    excluded = np.array([False, False, False, False, False, True])
    drawn = [drawn_between(values, excluded, 2 / 6, (1.0, 5.0), (0, step)) for step in range(40)]
    assert all(chosen.sum() == 2 for chosen in drawn)
    assert np.flatnonzero(np.any(drawn, 0)).tolist() == [1, 2, 3], "each candidate, no other token"
    again = drawn_between(values, excluded, 2 / 6, (1.0, 5.0), (0, 7))
    assert (again == drawn[7]).all(), "one seed, one draw"


def test_without_a_candidate_no_token_is_drawn() -> None:
    nothing = np.zeros(4, dtype=bool)
    assert not drawn_between(np.zeros(4), nothing, 1.0, (1.0, 5.0), (0,)).any(), "equal rewards"
    assert drawn_between(np.zeros(0), nothing[:0], 1.0, (1.0, 5.0), (0,)).shape == (0,)
    few = drawn_between(np.array([2.0, 0.0]), nothing[:2], 1.0, (1.0, 5.0), (0,))
    assert few.tolist() == [True, False]
