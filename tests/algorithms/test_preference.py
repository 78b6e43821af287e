"""Preference losses: numbers computed by hand, and gradients by enumeration of a model with three
tokens, against closed forms in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from asyncrl.algorithms.preference import (
    Completions,
    kto_baseline,
    kto_loss,
    off_policy_weights,
    pair_loss,
    scores,
)
from asyncrl.algorithms.preference_losses import Hinge, Ipo, Kto, PairLoss, Sigmoid, Simpo


def side(
    logprob: float, tokens: int, reference: float | None, behavior: float | None = None
) -> Completions:
    def one(value: float | None) -> torch.Tensor | None:
        return None if value is None else torch.tensor([value], dtype=torch.float64)

    return Completions(
        torch.tensor([logprob], dtype=torch.float64, requires_grad=True),
        torch.tensor([tokens]),
        one(reference),
        one(behavior),
    )


CHOSEN, REJECTED = side(-4.0, 2, -6.0, -4.5), side(-9.0, 3, -6.0, -8.0)
"""Log-ratios of 2 and -3 nats, over two and three tokens: a difference of 5, of means 1 + 1 = 2."""

BY_HAND: dict[str, tuple[PairLoss, float]] = {
    "sigmoid": (Sigmoid(beta=0.1), math.log1p(math.exp(-0.5))),
    "smoothed": (
        Sigmoid(beta=0.1, label_smoothing=0.2),
        0.8 * math.log1p(math.exp(-0.5)) + 0.2 * math.log1p(math.exp(0.5)),
    ),
    "sigmoid of means": (
        Sigmoid(beta=0.1, length_normalized=True),
        math.log1p(math.exp(-0.2)),
    ),
    "ipo": (Ipo(beta=0.1), (2.0 - 5.0) ** 2),
    "hinge": (Hinge(beta=0.1), 0.5),
    "hinge, far enough apart": (Hinge(beta=0.5), 0.0),
    "hinge of means": (Hinge(beta=0.1, length_normalized=True), 0.8),
    # Without a reference, the means are -2 and -3.
    "simpo": (
        Simpo(beta=2.0, simpo_margin=0.5),
        math.log1p(math.exp(-(2.0 * 1.0 - 0.5))),
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_losses_by_hand(name: str) -> None:
    loss, expected = BY_HAND[name]
    found = pair_loss(CHOSEN, REJECTED, loss)
    assert found.loss.tolist() == pytest.approx([expected], rel=1e-12)
    assert found.weights.tolist() == [1.0] and found.capped.tolist() == [False]


@pytest.mark.parametrize(
    ("loss", "rewards"),
    [
        (Sigmoid(beta=0.1), (0.2, -0.3)),
        (Ipo(beta=0.1), (0.1, -0.1)),
        (Simpo(beta=2.0), (-4.0, -6.0)),
    ],
)
def test_rewards_are_those_of_the_loss(loss: PairLoss, rewards: tuple[float, float]) -> None:
    found = pair_loss(CHOSEN, REJECTED, loss).rewards
    assert [value.item() for value in found] == pytest.approx(rewards)
    assert not any(value.requires_grad for value in found)


def test_the_off_policy_weight_covers_both_sides_and_has_no_gradient() -> None:
    """log-ratios to the behavior policy: 0.5 and -1, together -0.5."""
    loss = Sigmoid(beta=0.1)
    for cap, weight, capped in ((2.0, math.exp(-0.5), False), (0.25, 0.25, True)):
        weights, reduced = off_policy_weights(CHOSEN, REJECTED, cap)
        assert weights.tolist() == pytest.approx([weight]) and reduced.tolist() == [capped]
        weighted = pair_loss(CHOSEN, REJECTED, loss, cap)
        plain = pair_loss(CHOSEN, REJECTED, loss)
        assert weighted.loss.item() == pytest.approx(weight * plain.loss.item())
        for completions in (CHOSEN, REJECTED):
            (one,) = torch.autograd.grad(weighted.loss, completions.logprobs, retain_graph=True)
            (other,) = torch.autograd.grad(plain.loss, completions.logprobs, retain_graph=True)
            assert one.item() == pytest.approx(weight * other.item())
    far = side(500.0, 1, 0.0, 0.0)
    assert torch.isfinite(off_policy_weights(far, far, 1e30)[0]).all()


@pytest.mark.parametrize(
    ("desirable", "baseline", "expected"),
    [
        (True, 0.0, 2.0 * (1 - 1 / (1 + math.exp(-0.2)))),
        (True, 3.0, 2.0 * (1 - 1 / (1 + math.exp(0.1)))),
        (False, 3.0, 0.5 * (1 - 1 / (1 + math.exp(-0.1)))),
    ],
)
def test_kto_by_hand(desirable: bool, baseline: float, expected: float) -> None:
    """The chosen side's reward is 0.1 times 2 nats."""
    loss = Kto(beta=0.1, desirable_weight=2.0, undesirable_weight=0.5)
    found = kto_loss(CHOSEN, torch.tensor([desirable]), baseline, loss)
    assert found.loss.tolist() == pytest.approx([expected], rel=1e-12)
    assert found.rewards[0].tolist() == pytest.approx([0.2])


def test_ktos_baseline_is_a_mean_and_never_negative() -> None:
    assert kto_baseline(6.0, 4) == 1.5 and kto_baseline(-6.0, 4) == 0.0
    assert math.isnan(kto_baseline(float("nan"), 4)), "NaN must reach the step"


def test_missing_log_probs_are_refused() -> None:
    bare = side(-1.0, 1, None)
    with pytest.raises(ValueError, match="loss 'ipo' needs the reference policy's log-probs"):
        pair_loss(bare, bare, Ipo())
    assert scores(bare, Simpo()).tolist() == [-1.0]
    with pytest.raises(ValueError, match="weight_cap = 2 needs the behavior policy's log-probs"):
        pair_loss(bare, bare, Simpo(), 2.0)


VOCABULARY = 3
LOGITS = np.random.default_rng(0).normal(size=(VOCABULARY + 1, VOCABULARY))
REFERENCE = np.random.default_rng(1).normal(size=(VOCABULARY + 1, VOCABULARY))
"""A model of three tokens: the logits of the next token after each token, and in the last row at
the start."""
SEQUENCES = [tokens for length in (1, 2, 3) for tokens in product(range(VOCABULARY), repeat=length)]
PAIRS = [(one, other) for one in SEQUENCES for other in SEQUENCES if one != other]


def contexts(tokens: tuple[int, ...]) -> list[int]:
    return [VOCABULARY, *tokens[:-1]]


def logprob(logits: np.ndarray, tokens: tuple[int, ...]) -> float:
    normalized = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return float(normalized[contexts(tokens), list(tokens)].sum())


def slope_of_logprob(logits: np.ndarray, tokens: tuple[int, ...]) -> np.ndarray:
    """The gradient of a sequence's log-prob: one-hot minus probabilities, at each of its
    contexts."""
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    gradient = np.zeros_like(logits)
    for context, token in zip(contexts(tokens), tokens, strict=True):
        gradient[context] -= probabilities[context]
        gradient[context, token] += 1
    return gradient


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def completions(logits: torch.Tensor, sequences: list[tuple[int, ...]]) -> Completions:
    """The sequences under the model with gradient, as a packed row: all tokens, then sums."""
    normalized = logits.log_softmax(1)
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    before = torch.tensor([token for sequence in sequences for token in contexts(sequence)])
    owner = torch.arange(len(sequences)).repeat_interleave(
        torch.tensor([len(sequence) for sequence in sequences])
    )
    sums = torch.zeros(len(sequences), dtype=torch.float64)
    return Completions(
        sums.index_add(0, owner, normalized[before, tokens]),
        torch.tensor([len(sequence) for sequence in sequences]),
        torch.tensor(np.array([logprob(REFERENCE, sequence) for sequence in sequences])),
    )


def score(tokens: tuple[int, ...], mean: bool, reference: bool = True) -> float:
    ratio = logprob(LOGITS, tokens) - reference * logprob(REFERENCE, tokens)
    return ratio / len(tokens) if mean else ratio


BETA = 0.7
Slope = Callable[[float], float]
CLOSED_FORMS: dict[str, tuple[PairLoss, Slope]] = {
    "sigmoid": (Sigmoid(beta=BETA), lambda d: -BETA * sigmoid(-BETA * d)),
    "smoothed": (
        Sigmoid(beta=BETA, label_smoothing=0.3),
        lambda d: -BETA * (0.7 * sigmoid(-BETA * d) - 0.3 * sigmoid(BETA * d)),
    ),
    "sigmoid of means": (
        Sigmoid(beta=BETA, length_normalized=True),
        lambda d: -BETA * sigmoid(-BETA * d),
    ),
    "ipo": (Ipo(beta=BETA), lambda d: 2 * (d - 1 / (2 * BETA))),
    "hinge": (
        Hinge(beta=BETA),
        lambda d: -BETA if BETA * d < 1 else 0.0,
    ),
    "simpo": (
        Simpo(beta=BETA, simpo_margin=0.4),
        lambda d: -BETA * sigmoid(-(BETA * d - 0.4)),
    ),
}
"""The derivative of each loss for the difference d of the scores."""


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_gradients_equal_the_closed_form_for_every_pair(name: str) -> None:
    loss, slope = CLOSED_FORMS[name]
    logits = torch.tensor(LOGITS, requires_grad=True)
    chosen, rejected = (completions(logits, [pair[at] for pair in PAIRS]) for at in (0, 1))
    losses = pair_loss(chosen, rejected, loss).loss
    expected = np.zeros_like(LOGITS)
    for number, (one, other) in enumerate(PAIRS):
        first, second = (score(tokens, loss.uses_means, name != "simpo") for tokens in (one, other))
        lengths = (len(one), len(other)) if loss.uses_means else (1, 1)
        of_pair = slope(first - second) * (
            slope_of_logprob(LOGITS, one) / lengths[0]
            - slope_of_logprob(LOGITS, other) / lengths[1]
        )
        expected += of_pair
        if number % 97 == 0:
            (found,) = torch.autograd.grad(losses[number], logits, retain_graph=True)
            np.testing.assert_allclose(found, of_pair, atol=1e-12)
    (found,) = torch.autograd.grad(losses.sum(), logits)
    np.testing.assert_allclose(found, expected, atol=1e-9)
    assert np.abs(expected).max() > 1


@pytest.mark.parametrize("desirable", [True, False])
def test_ktos_gradient_equals_the_closed_form_for_every_completion(desirable: bool) -> None:
    loss = Kto(beta=BETA, desirable_weight=1.3, undesirable_weight=0.6)
    baseline = 0.25
    logits = torch.tensor(LOGITS, requires_grad=True)
    labels = torch.full((len(SEQUENCES),), desirable)
    loss = kto_loss(completions(logits, SEQUENCES), labels, baseline, loss).loss.sum()
    (found,) = torch.autograd.grad(loss, logits)
    expected = np.zeros_like(LOGITS)
    for tokens in SEQUENCES:
        gain = sigmoid(BETA * (score(tokens, False) - baseline))
        slope = (-1.3 if desirable else 0.6) * BETA * gain * (1 - gain)
        expected += slope * slope_of_logprob(LOGITS, tokens)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_the_optimum_of_dpo_is_the_reference_tilted_by_the_reward() -> None:
    """Over all pairs of a finite set, with labels drawn from the Bradley-Terry model of a reward,
    the expected loss is stationary at π ∝ π_reference · exp(reward / beta), and only there."""
    generator = np.random.default_rng(2)
    reference, reward = generator.normal(size=9), generator.normal(size=9)
    one, other = np.array([(i, j) for i in range(9) for j in range(9) if i != j]).T
    preferred = torch.tensor(1 / (1 + np.exp(reward[other] - reward[one])))

    def gradient(policy: np.ndarray) -> torch.Tensor:
        logits = torch.tensor(policy, requires_grad=True)
        both = [
            Completions(
                logits.log_softmax(0)[at],
                torch.ones(len(at)),
                torch.tensor(reference).log_softmax(0)[at],
            )
            for at in (one, other)
        ]
        loss = (preferred * pair_loss(both[0], both[1], Sigmoid(beta=0.3)).loss).sum()
        (found,) = torch.autograd.grad(loss, logits)
        return found

    assert gradient(reference + reward / 0.3).abs().max() < 1e-12
    assert gradient(reference + reward / 0.2).abs().max() > 1e-2
