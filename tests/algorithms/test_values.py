"""Generalized advantage estimation and the value loss, on hand-computed numbers and against the
formulas of the paper."""

import numpy as np
import pytest
import torch

from asyncrl.algorithms.values import gae, value_loss


def test_gae_on_hand_computed_numbers() -> None:
    # δ = 0.5 - 0.2, 0.4 - 0.5, 1 - 0.4 with γ = 1; λ = 0.5
    assert gae(1.0, np.array([0.2, 0.5, 0.4]), 1.0, 0.5).tolist() == pytest.approx(
        [0.3 + 0.5 * (-0.1 + 0.5 * 0.6), -0.1 + 0.5 * 0.6, 0.6]
    )
    # γ = 0.5, λ = 0: the one-step errors
    assert gae(1.0, np.array([0.2, 0.5, 0.4]), 0.5, 0.0).tolist() == pytest.approx(
        [0.25 - 0.2, 0.2 - 0.5, 1 - 0.4]
    )


def test_the_last_token_gets_the_reward_that_no_token_has() -> None:
    """With λ = γ = 1 and values of 0, the advantage is the sum of all later rewards. The tokens
    have 0.5 + 0 + 1, and the last one also gets 2 - 1.5."""
    per_token = np.array([0.5, 0.0, 1.0])
    assert gae(2.0, np.zeros(3), 1.0, 1.0, per_token).tolist() == [2.0, 1.5, 1.5]
    assert gae(2.0, np.zeros(3), 1.0, 0.0, per_token).tolist() == [0.5, 0.0, 1.5]
    assert per_token.tolist() == [0.5, 0.0, 1.0]


def test_gae_with_lambda_one_is_the_return_less_the_value() -> None:
    values = np.random.default_rng(0).random(7)
    discounted = 2.0 * 0.9 ** np.arange(6, -1, -1)
    np.testing.assert_allclose(gae(2.0, values, 0.9, 1.0), discounted - values)


def test_gae_against_the_sum_of_the_paper() -> None:
    values, gamma, lam, reward = np.random.default_rng(1).random(5), 0.97, 0.8, -1.5
    deltas = [
        (reward if t == 4 else 0.0) + (gamma * values[t + 1] if t < 4 else 0.0) - values[t]
        for t in range(5)
    ]
    expected = [
        sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, 5)) for t in range(5)
    ]
    np.testing.assert_allclose(gae(reward, values, gamma, lam), expected)


def test_a_cut_answer_continues_with_the_value_after_it() -> None:
    # δ of the last token: 1 + 0.5 · 0.8 - 0.4; of the first: 0.5 · 0.4 - 0.2. λ = 0.5
    last = 1.0 + 0.5 * 0.8 - 0.4
    found = gae(1.0, np.array([0.2, 0.4]), 0.5, 0.5, after=0.8)
    assert found.tolist() == pytest.approx([0.0 + 0.25 * last, last])
    assert gae(0.0, np.array([0.7]), 1.0, 0.95, after=0.7).tolist() == [0.0], "nothing is lost"


def test_a_cut_answer_has_the_advantages_of_the_uncut_one_under_true_values() -> None:
    """With the values of a known return, an answer cut anywhere has the advantages of the whole
    one, for any λ: all of them are 0."""
    returns = 3.0 * 0.9 ** np.arange(5, -1, -1)
    np.testing.assert_allclose(gae(3.0, returns, 0.9, 0.7), np.zeros(6), atol=1e-12)
    for cut in range(1, 6):
        found = gae(0.0, returns[:cut], 0.9, 0.7, after=returns[cut])
        np.testing.assert_allclose(found, np.zeros(cut), atol=1e-12)


def test_no_tokens_no_advantages() -> None:
    assert gae(1.0, np.zeros(0), 1.0, 0.95).shape == (0,)


def test_value_loss_on_hand_computed_numbers() -> None:
    values = torch.tensor([0.5, 0.0], requires_grad=True)
    loss = value_loss(values, torch.tensor([1.0, -2.0]), torch.tensor([1.0, 0.5]))
    assert loss.item() == pytest.approx((0.25 + 0.5 * 4) / 2)
    (gradient,) = torch.autograd.grad(loss, values)
    assert gradient.tolist() == pytest.approx([-0.5, 1.0])
