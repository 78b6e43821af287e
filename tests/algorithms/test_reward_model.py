"""The loss of a reward model: numbers computed by hand, and its derivatives."""

from __future__ import annotations

import math

import pytest
import torch

from asyncrl.algorithms.reward_model import bradley_terry


def test_losses_by_hand() -> None:
    chosen, rejected = torch.tensor([2.0, -1.0, 0.0]), torch.tensor([0.5, 1.0, 0.0])
    differences, sums = (1.5, -2.0, 0.0), (2.5, 0.0, 0.0)
    for coef in (0.0, 0.1):
        found = bradley_terry(chosen, rejected, coef)
        expected = [
            math.log1p(math.exp(-difference)) + coef * total**2
            for difference, total in zip(differences, sums, strict=True)
        ]
        assert found.tolist() == pytest.approx(expected, rel=1e-12)


def test_derivatives_are_the_probability_of_the_wrong_order() -> None:
    """d loss / d chosen = -σ(rejected - chosen) + 2c·(chosen + rejected), and the reverse."""
    scores = torch.tensor([[0.7], [-0.4]], dtype=torch.float64, requires_grad=True)
    bradley_terry(scores[0], scores[1], 0.2).sum().backward()
    wrong, center = 1 / (1 + math.exp(1.1)), 2 * 0.2 * 0.3
    assert scores.grad is not None
    assert scores.grad[:, 0].tolist() == pytest.approx([center - wrong, center + wrong])


def test_scores_far_apart_stay_finite() -> None:
    found = bradley_terry(torch.tensor([0.0]), torch.tensor([5000.0]), 0.0)
    assert found.tolist() == [5000.0]
