"""The KL divergence as a reward: on hand-computed numbers, and its gradient by enumeration of every
answer."""

import itertools
import math

import pytest
import torch

from asyncrl.algorithms.kl import kl_estimate, reward_kl

VOCABULARY, LENGTH = 3, 2


def test_the_estimate_by_hand() -> None:
    # π_ref / μ = 2 and 1/4
    logprobs, reference = [math.log(0.25), math.log(0.8)], [math.log(0.5), math.log(0.2)]
    assert reward_kl(logprobs, reference) == pytest.approx(-math.log(2) + math.log(4))
    assert reward_kl([-50.0], [-1.0]) == -20.0
    assert reward_kl([-1.0, -2.0], [-1.0, -2.0]) == 0.0


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="2 log-probs came with 1"):
        reward_kl([0.0, 0.0], [0.0])


def policy(seed: int, away_from: torch.Tensor | None = None) -> torch.Tensor:
    """Draw the logits of the first token, and of the second after each first token, near those of
    another policy."""
    draw = torch.randn(
        VOCABULARY + 1,
        VOCABULARY,
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    )
    return draw if away_from is None else away_from + 0.3 * draw


def answers(logits: torch.Tensor) -> torch.Tensor:
    """Return the log-probs [answers, LENGTH] of both tokens of every possible answer."""
    tables = logits.log_softmax(-1)
    pairs = itertools.product(range(VOCABULARY), repeat=LENGTH)
    return torch.stack([torch.stack([tables[0, a], tables[a + 1, b]]) for a, b in pairs])


def gradients(seed: int, estimator: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact gradients of the KL divergence, and of its expected penalty as a reward."""
    reference = policy(seed)
    logits = policy(seed + 100, away_from=reference).requires_grad_()
    ours, theirs = answers(logits), answers(reference)
    whole = ours.sum(1)
    divergence = (whole.exp() * (whole - theirs.sum(1))).sum()
    (exact,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    if estimator == "reward_kl":
        penalty = torch.tensor(
            [reward_kl(a.tolist(), b.tolist()) for a, b in zip(ours, theirs, strict=True)]
        )
    else:
        penalty = kl_estimate(theirs - ours.detach(), estimator).sum(1)
    (as_reward,) = torch.autograd.grad((whole.exp().detach() * penalty * whole).sum(), logits)
    return exact, as_reward


@pytest.mark.parametrize("seed", range(5))
def test_as_a_reward_it_has_the_gradient_of_the_divergence(seed: int) -> None:
    exact, found = gradients(seed, "reward_kl")
    torch.testing.assert_close(found, exact, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("estimator", ["k2", "k3", "low_var"])
def test_the_other_estimators_have_another_gradient(estimator: str) -> None:
    cosines = [
        float(torch.cosine_similarity(*(g.flatten() for g in gradients(seed, estimator)), dim=0))
        for seed in range(5)
    ]
    assert min(cosines) < 0 and max(cosines) < 0.9
