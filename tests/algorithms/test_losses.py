"""Every loss on hand-computed numbers, and the whole policy loss compared with an independent
numpy implementation."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch

from asyncrl.algorithms.losses import Loss
from asyncrl.algorithms.losses.cispo import Cispo
from asyncrl.algorithms.losses.clip_cov import ClipCov
from asyncrl.algorithms.losses.dppo import Dppo
from asyncrl.algorithms.losses.gmpo import Gmpo
from asyncrl.algorithms.losses.kl_cov import KlCov
from asyncrl.algorithms.losses.ppo import Ppo
from asyncrl.algorithms.losses.sapo import Sapo
from asyncrl.algorithms.losses.token_loss import Terms, TokenLoss
from asyncrl.algorithms.losses.vespo import Vespo
from asyncrl.algorithms.objective import (
    policy_loss,
    supervised_loss,
    token_weights,
    truncated_weights,
)
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.config import PolicyGradient
from asyncrl.contracts.section import kinds_of, name_of

LOSSES = [name for kind in kinds_of(Loss) if (name := name_of(kind))]
"""The built-in ones."""


def log(*values: float) -> torch.Tensor:
    return torch.tensor([math.log(value) for value in values], dtype=torch.float64)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens(logprobs, behavior, advantages, lengths=None, ages=None, weights=None) -> PolicyTokens:
    """Make tokens of one trajectory, or of trajectories with the given lengths."""
    count = len(behavior)
    lengths = lengths or [count]
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    zero, one = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
    return PolicyTokens(
        logprobs,
        behavior,
        advantages,
        one if weights is None else weights,
        sequence,
        len(lengths),
        zero if ages is None else ages,
    )


def objective(**settings) -> PolicyGradient:
    return PolicyGradient.model_validate(settings)


def terms(loss: TokenLoss, batch: PolicyTokens) -> Terms:
    """The loss of each token, from the log-ratio to the loss's old policy."""
    return loss.terms(batch, batch.log_ratio(loss.old_policy))


def at_ratios(loss: TokenLoss, log_ratio: torch.Tensor, advantages: torch.Tensor, **known) -> Terms:
    """The loss of the tokens of one trajectory with these log-ratios."""
    batch = tokens(log_ratio, torch.zeros_like(log_ratio), advantages)
    return loss.terms(replace(batch, **known), log_ratio)


def gradient(loss: torch.Tensor, logprobs: torch.Tensor) -> list[float]:
    (found,) = torch.autograd.grad(loss, logprobs)
    return found.tolist()


def test_ppo_on_hand_computed_numbers() -> None:
    # ratios 1.5, 0.5, 1.5, 0.5, 1.1 with clip range [0.8, 1.28]
    learner, behavior = (
        log(0.75, 0.25, 0.75, 0.25, 0.55).requires_grad_(),
        log(0.5, 0.5, 0.5, 0.5, 0.5),
    )
    # min(1.5, 1.28), min(0.5, 0.8), min(-1.5, -1.28), min(-0.5, -0.8), min(2.2, 2.2)
    loss, sums = policy_loss(tokens(learner, behavior, tensor(1, 1, -1, -1, 2)), objective())
    assert loss.item() == pytest.approx(-(1.28 + 0.5 - 1.5 - 0.8 + 2.2))
    assert (sums.clipped.item(), sums.masked.item()) == (2, 0)
    assert (sums.ratio.item(), sums.ratio_max.item(), sums.ratio_squared.item()) == pytest.approx(
        (5.1, 1.5, 2 * 2.25 + 2 * 0.25 + 1.21)
    )
    # A clipped token has no gradient. Any other token has -r·A.
    assert gradient(loss, learner) == pytest.approx([0.0, -0.5, 1.5, 0.0, -2.2])


def test_dual_clip_bounds_the_loss_of_a_negative_advantage() -> None:
    log_ratio = log(4.0, 2.0).requires_grad_()
    loss, stopped, _ = at_ratios(Ppo(dual_clip=3.0), log_ratio, tensor(-1, -1))
    assert loss.tolist() == pytest.approx([3.0, 2.0]) and stopped.tolist() == [True, False]
    assert gradient(loss.sum(), log_ratio) == pytest.approx([0.0, 2.0])


def test_gspo_has_one_ratio_for_a_trajectory() -> None:
    # Two trajectories: mean log-ratios (log 4 + log 1) / 2 = log 2, and log 1.1.
    learner, behavior = log(0.8, 0.5, 0.55).requires_grad_(), log(0.2, 0.5, 0.5)
    loss, sums = policy_loss(
        tokens(learner, behavior, tensor(1, 1, 1), lengths=[2, 1]), objective(loss="gspo")
    )
    assert loss.item() == pytest.approx(-(1.28 + 1.28 + 1.1))
    assert sums.clipped.item() == 2
    assert gradient(loss, learner) == pytest.approx([0.0, 0.0, -1.1])
    loss, _ = policy_loss(
        tokens(learner, behavior, tensor(-1, -1, 1), lengths=[2, 1]), objective(loss="gspo")
    )
    assert gradient(loss, learner) == pytest.approx([2.0, 2.0, -1.1])


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    logprobs = log(0.75, 0.25).requires_grad_()
    batch = tokens(logprobs, log(0.5, 0.5), tensor(2, -1))
    loss, stopped, _ = terms(Cispo(eps_clip=0.2, eps_clip_high=0.28), batch)
    assert (
        loss.tolist() == pytest.approx([-1.28 * 2 * math.log(0.75), 0.8 * math.log(0.25)])
        and stopped.all()
    )
    assert gradient(loss.sum(), logprobs) == pytest.approx([-2.56, 0.8])


def test_cispo_has_no_lower_clip_unless_it_is_set() -> None:
    behavior, learner = log(0.9), log(0.0009).requires_grad_()
    for settings, weight in (({}, 0.001), ({"eps_clip": 0.2}, 0.8)):
        loss, sums = policy_loss(
            tokens(learner, behavior, tensor(1.0)), objective(loss={"name": "cispo", **settings})
        )
        assert gradient(loss, learner) == pytest.approx([-weight]) and sums.clipped.item() == len(
            settings
        )


def test_drift_from_an_old_kv_cache_is_separate_from_staleness() -> None:
    """Drift counts tokens of the learner's own version in trajectories that an older version
    started. Without the old KV cache, they would have the learner's log-probs."""
    learner = tensor(-1.0, -1.0, -1.0, -1.0, -1.0)
    batch = tokens(
        learner,
        learner + tensor(0.5, 0.25, 0.125, 0.5, 0.5),
        tensor(1, 1, 1, 1, 1),
        lengths=[3, 2],
        ages=tensor(1, 0, 0, 0, 0),
    )
    _, sums = policy_loss(batch, objective())
    assert (float(sums.drift), float(sums.drift_tokens)) == (0.375, 2)


def test_masks_are_counted_by_reason() -> None:
    settings = {
        "band": {"above": 1.9},
        "rejection": {"above": 0.6, "estimator": "k1"},
        "sequence_mask": {"above": 0.3},
    }
    learner, behavior = log(0.9, 0.25, 0.5, 0.5), log(0.45, 0.5, 0.5, 0.7)
    _, sums = policy_loss(
        tokens(learner, behavior, tensor(1, 1, -1, -1), lengths=[2, 2]),
        objective(correction=settings),
    )
    # Ratios 2, 0.5, 1, 0.714. The first is outside the band. |k1| = 0.69 rejects the first two. The
    # mean -l = 0.168 of the second trajectory is below the threshold.
    assert (
        float(sums.masked_band),
        float(sums.masked_rejected),
        float(sums.masked_sequence),
        float(sums.masked),
    ) == (1, 2, 0, 2)
    _, sums = policy_loss(
        tokens(learner, behavior, tensor(1, 1, -1, -1), lengths=[2, 2]),
        objective(correction={**settings, "sequence_mask": {"above": 0.1}}),
    )
    assert (float(sums.masked_sequence), float(sums.masked)) == (2, 4)


def test_sapo_is_the_policy_gradient_on_policy_and_fades_away_from_it() -> None:
    log_ratio = log(1.0, 1.0, 3.0).requires_grad_()
    sapo = Sapo(tau_positive=1.0, tau_negative=1.05)
    loss = at_ratios(sapo, log_ratio, tensor(1, -1, 1)).loss
    gate = 1 / (1 + math.exp(-2))
    assert loss[2].item() == pytest.approx(-4 * gate)
    assert gradient(loss.sum(), log_ratio) == pytest.approx([-1.0, 1.0, -4 * gate * (1 - gate) * 3])


def test_dppo_stops_only_what_moves_further_away() -> None:
    logprobs, behavior = (
        log(0.7, 0.7, 0.3, 0.3, 0.02).requires_grad_(),
        log(0.5, 0.5, 0.5, 0.5, 0.01),
    )
    batch = tokens(logprobs, behavior, tensor(1, -1, 1, -1, 1))
    loss, stopped, _ = terms(Dppo(threshold=0.15), batch)
    assert stopped.tolist() == [True, False, False, True, False]
    assert gradient(loss.sum(), logprobs) == pytest.approx([0.0, 1.4, -0.6, 0.0, -2.0])


def test_gmpo_is_the_geometric_mean_of_the_clipped_ratios() -> None:
    # A > 0: ratios 4 and 1, of which 1.28 and 1 remain. Second trajectory: 1.1.
    learner, behavior = log(0.8, 0.5, 0.55).requires_grad_(), log(0.2, 0.5, 0.5)
    batch = tokens(learner, behavior, tensor(2, 2, 1), lengths=[2, 1])
    loss, sums = policy_loss(batch, objective(loss="gmpo"))
    mean = math.sqrt(1.28)
    assert loss.item() == pytest.approx(-(2 * 2 * mean + 1.1))
    assert sums.clipped.item() == 1
    assert gradient(loss, learner) == pytest.approx([0.0, -2 * mean, -1.1])
    # A < 0: only the lower clip acts. Ratios 4 and 0.5, of which 4 and 0.8 remain.
    learner, behavior = log(0.8, 0.25).requires_grad_(), log(0.2, 0.5)
    loss, sums = policy_loss(tokens(learner, behavior, tensor(-1, -1)), objective(loss="gmpo"))
    mean = math.sqrt(4 * 0.8)
    assert loss.item() == pytest.approx(2 * mean) and sums.clipped.item() == 1
    assert gradient(loss, learner) == pytest.approx([mean, 0.0])


def test_gmpo_without_a_lower_clip_bounds_nothing_below() -> None:
    loss, stopped, _ = at_ratios(Gmpo(eps_clip=1.0), tensor(-30.0, 0.0), tensor(-1, -1))
    assert loss.tolist() == pytest.approx([math.exp(-15)] * 2) and not stopped.any()


def test_vespo_weights_a_trajectory_by_its_product_of_ratios() -> None:
    # Products: 2 · 1.5 = 3 with A > 0, 0.5 with A < 0.
    learner, behavior = log(0.8, 0.6, 0.25).requires_grad_(), log(0.4, 0.4, 0.5)
    batch = tokens(learner, behavior, tensor(2, 2, -1), lengths=[2, 1])
    loss, sums = policy_loss(batch, objective(loss="vespo"))
    good, bad = 3**2 * math.exp(3 * (1 - 3)), 0.5**3 * math.exp(2 * (1 - 0.5))
    assert loss.item() == pytest.approx(
        -2 * good * (math.log(0.8) + math.log(0.6)) + bad * math.log(0.25)
    )
    assert gradient(loss, learner) == pytest.approx([-2 * good, -2 * good, bad])
    assert sums.clipped.item() == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_vespos_weight_is_1_on_policy_and_largest_at_k_by_lambda(advantage: float) -> None:
    vespo = Vespo(k_positive=2.0, lambda_positive=4.0, k_negative=3.0, lambda_negative=1.5)
    k, lam = (2.0, 4.0) if advantage > 0 else (3.0, 1.5)

    def weight(product: float) -> float:
        batch = tokens(tensor(-1.0), tensor(-1.0), tensor(advantage))
        return vespo.terms(batch, log(product)).loss.item() * advantage

    assert weight(1.0) == pytest.approx(1.0)
    assert weight(k / lam) > max(weight(k / lam * 1.01), weight(k / lam * 0.99))
    assert 0 <= weight(1e8) < 1e-12 and 0 <= weight(1e-9) < 1e-12


def test_clip_cov_stops_the_selected_tokens_and_clips_the_others() -> None:
    log_ratio = log(1.5, 1.1, 0.5, 1.0).requires_grad_()
    selected = torch.tensor([False, True, False, False])
    loss, stopped, _ = at_ratios(ClipCov(), log_ratio, tensor(1, 1, -1, 1), selected=selected)
    assert loss.tolist() == pytest.approx([-1.28, 0.0, 0.8, -1.0])
    assert stopped.tolist() == [True, True, True, False]
    assert gradient(loss.sum(), log_ratio) == pytest.approx([0.0, 0.0, 0.0, -1.0])


def test_kl_cov_penalizes_the_selected_tokens_on_both_sides_of_the_old_policy() -> None:
    log_ratio = log(2.0, 0.5, 2.0, 1.0).requires_grad_()
    selected = torch.tensor([True, True, False, True])
    kl_cov = KlCov(kl_cov_coef=0.3)
    loss, stopped, _ = at_ratios(kl_cov, log_ratio, tensor(1, 1, 1, 1), selected=selected)
    penalty = 0.3 * math.log(2)
    assert loss.tolist() == pytest.approx([-2 + penalty, -0.5 + penalty, -2.0, -1.0])
    assert not stopped.any()
    assert gradient(loss.sum(), log_ratio) == pytest.approx([-1.7, -0.8, -2.0, -1.0])


def test_the_objective_passes_the_selected_tokens_on() -> None:
    learner, behavior = log(0.6, 0.5, 0.9).requires_grad_(), log(0.5, 0.5, 0.5)
    batch = tokens(learner, behavior, tensor(1, 1, 1))
    chosen = replace(batch, selected=torch.tensor([True, False, False]))
    for loss, unselected, selected in (
        (ClipCov(), [-1.2, -1.0, 0.0], [0.0, -1.0, 0.0]),
        (KlCov(kl_cov_coef=0.5), [-1.2, -1.0, -1.8], [-0.7, -1.0, -1.8]),
    ):
        for which, wanted in ((batch, unselected), (chosen, selected)):
            found, _ = policy_loss(which, objective(loss=loss))
            assert gradient(found, learner) == pytest.approx(wanted), loss
    assert terms(ClipCov(), batch).stopped.tolist() == [False, False, True]


def numerical_gradient(function: Callable[[torch.Tensor], float], at: torch.Tensor) -> list[float]:
    """Central differences in float64."""
    slopes = []
    for place in range(len(at)):
        step = torch.zeros_like(at)
        step[place] = 1e-6
        slopes.append((function(at + step) - function(at - step)) / 2e-6)
    return slopes


VOCABULARY, LENGTH = 3, 2
OLD = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4], [0.2, 0.2, 0.6]]).double()
"""The old policy: the first token's probabilities, then the second one's after each first token."""


def every_answer(theta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [9, 2] of all answers of two tokens under softmax(theta) and under OLD."""
    rows = []
    for table in (theta.view(4, 3).log_softmax(1), OLD.log()):
        answers = itertools.product(range(VOCABULARY), repeat=LENGTH)
        rows.append(torch.stack([torch.stack([table[0, a], table[1 + a, b]]) for a, b in answers]))
    return rows[0], rows[1].detach()


ADVANTAGES = tensor(1.0, -2.0, 0.5, 0.3, -0.7, 1.5, -1.0, 2.0, -0.1)


@pytest.mark.parametrize("moved", [0.1, 0.9])
@pytest.mark.parametrize("loss", ["gmpo", "kl_cov", "clip_cov"])
def test_gradients_by_enumeration_equal_finite_differences(loss: str, moved: float) -> None:
    """All nine answers, each weighted by its probability under the old policy. The objective is
    written from the paper's formula, one answer at a time."""
    generator = torch.Generator().manual_seed(3)
    theta = OLD.log().flatten() + moved * torch.randn(12, generator=generator).double()
    low, high = 0.8, 1.28
    selected = torch.tensor([0, 1, 0, 0, 0, 1, 1, 0, 0] * 2).bool()

    def by_hand(at: torch.Tensor) -> float:
        new, old = every_answer(at)
        total = 0.0
        for answer, advantage in enumerate(ADVANTAGES.tolist()):
            chosen = selected.view(9, 2)[answer].tolist()
            ratios = (new - old)[answer].exp().tolist()
            bounded = [min(r, high) if advantage > 0 else max(r, low) for r in ratios]
            mass = math.exp(old[answer].sum())
            if loss == "gmpo":
                gain = math.prod(bounded) ** (1 / LENGTH) * advantage
            elif loss == "clip_cov":
                gains = [
                    0.0 if skip else min(r * advantage, min(max(r, low), high) * advantage)
                    for r, skip in zip(ratios, chosen, strict=True)
                ]
                gain = sum(gains) / LENGTH
            else:
                gains = [
                    r * advantage - 0.4 * abs(math.log(r)) * skip
                    for r, skip in zip(ratios, chosen, strict=True)
                ]
                gain = sum(gains) / LENGTH
            total -= mass * gain
        return total

    free = theta.clone().requires_grad_()
    new, old = every_answer(free)
    weights = old.sum(1).exp().repeat_interleave(LENGTH) / LENGTH
    batch = replace(
        tokens(
            new.flatten(),
            old.flatten(),
            ADVANTAGES.repeat_interleave(LENGTH),
            lengths=[LENGTH] * 9,
            weights=weights,
        ),
        selected=selected,
    )
    settings = {"name": loss} | ({"kl_cov_coef": 0.4} if loss == "kl_cov" else {})
    value, sums = policy_loss(batch, objective(loss=settings))
    assert value.item() == pytest.approx(by_hand(theta), abs=1e-12)
    expected = numerical_gradient(by_hand, theta)
    assert gradient(value, free) == pytest.approx(expected, abs=1e-8)
    if moved > 0.5 and loss == "gmpo":
        assert 0 < sums.clipped.item() < 18, "some tokens are clipped, some are not"


def test_vespos_gradient_by_enumeration() -> None:
    """The sum over all answers of μ(y) · φ(W(y)) · A(y) · ∇log π(y), with ∇ by finite
    differences."""
    generator = torch.Generator().manual_seed(4)
    theta = OLD.log().flatten() + 0.4 * torch.randn(12, generator=generator).double()
    new, old = every_answer(theta)
    products = (new - old).sum(1).exp()
    slopes = torch.zeros(12, dtype=torch.float64)
    for answer, advantage in enumerate(ADVANTAGES.tolist()):
        k, lam = (2.0, 3.0) if advantage > 0 else (3.0, 2.0)
        w = products[answer].item()
        weight = math.exp(old[answer].sum()) * w**k * math.exp(lam * (1 - w))

        def logprob(at: torch.Tensor, answer: int = answer) -> float:
            return every_answer(at)[0][answer].sum().item()

        slopes += weight * advantage * torch.tensor(numerical_gradient(logprob, theta)).double()
    free = theta.clone().requires_grad_()
    new, old = every_answer(free)
    batch = tokens(
        new.flatten(),
        old.flatten(),
        ADVANTAGES.repeat_interleave(LENGTH),
        lengths=[LENGTH] * 9,
        weights=old.sum(1).exp().repeat_interleave(LENGTH),
    )
    value, _ = policy_loss(batch, objective(loss="vespo"))
    assert gradient(value, free) == pytest.approx((-slopes).tolist(), abs=1e-8)


def test_reinforce_with_truncated_weights() -> None:
    learner, behavior = log(0.9, 0.4).requires_grad_(), log(0.3, 0.5)
    settings = objective(
        loss="reinforce", correction={"truncation": {"level": "token", "cap": 2.0}}
    )
    loss, sums = policy_loss(tokens(learner, behavior, tensor(1, -3)), settings)
    assert gradient(loss, learner) == pytest.approx([-2.0, 0.8 * 3])
    assert sums.weight.item() == pytest.approx(2.8)


def test_geometric_weights_and_a_floor() -> None:
    # Ratios 2 and 0.5 give the geometric mean 1; 9 is cut to 3, and 0.01 is raised to 0.2.
    learner = log(0.8, 0.25, 0.9, 0.005).requires_grad_()
    batch = tokens(learner, log(0.4, 0.5, 0.1, 0.5), tensor(1, 1, 1, 1), lengths=[2, 1, 1])
    settings = objective(
        loss="reinforce",
        correction={"truncation": {"level": "geometric", "cap": 3.0, "floor": 0.2}},
    )
    loss, sums = policy_loss(batch, settings)
    assert gradient(loss, learner) == pytest.approx([-1.0, -1.0, -3.0, -0.2])
    assert truncated_weights(batch, settings).tolist() == pytest.approx([1.0, 1.0, 3.0, 0.2])
    assert sums.capped.item() == 2


def test_decoupled_ppo_is_the_weighted_policy_gradient_where_the_learner_is_proximal() -> None:
    learner, behavior = log(0.9, 0.4).requires_grad_(), log(0.3, 0.5)
    settings = objective(
        loss={"name": "ppo", "old_policy": "learner"},
        correction={"truncation": {"level": "token", "cap": 5.0}},
    )
    loss, sums = policy_loss(tokens(learner, behavior, tensor(1, -3)), settings)
    assert loss.item() == pytest.approx(-(3.0 * 1 - 0.8 * 3)) and sums.clipped.item() == 0
    assert gradient(loss, learner) == pytest.approx([-3.0, 0.8 * 3])


def test_the_log_linear_proximal_policy_is_one_version_older() -> None:
    logprobs, behavior = tensor(-1, -1, -1, -1), tensor(-3, -3, -3, -3)
    batch = tokens(logprobs, behavior, tensor(1, 1, 1, 1), ages=tensor(0, 1, 2, 4))
    assert batch.old_logprobs("log_linear").tolist() == pytest.approx([-1, -3, -2, -1.5])


def test_decoupled_ppo_with_the_log_linear_policy() -> None:
    # Age 2: proximal log-prob half-way, ratio to it exp(0.5), weight to it exp(0.5).
    learner, behavior = tensor(-1.0).requires_grad_(), tensor(-2.0)
    settings = objective(
        loss={"name": "ppo", "old_policy": "log_linear", "eps_clip_high": 1.0},
        correction={"truncation": {"level": "token", "cap": 10.0}},
    )
    loss, _ = policy_loss(tokens(learner, behavior, tensor(1.0), ages=tensor(2.0)), settings)
    assert loss.item() == pytest.approx(-math.e)
    assert gradient(loss, learner) == pytest.approx([-math.e])


def test_at_the_behavior_policy_every_loss_gives_the_policy_gradient() -> None:
    for name in LOSSES:
        logprobs = tensor(-1.0, -2.0, -0.5).requires_grad_()
        loss, sums = policy_loss(
            tokens(logprobs, logprobs.detach(), tensor(0.5, -2.0, 1.0), lengths=[2, 1]),
            objective(loss=name),
        )
        assert gradient(loss, logprobs) == pytest.approx([-0.5, 2.0, -1.0]), name
        assert sums.kl_k1.item() == sums.kl_k3.item() == 0.0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("truncation", ["none", "token", "sequence"])
def test_policy_loss_against_numpy(seed: int, truncation: str) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 30, 8).tolist()
    count = sum(lengths)
    learner, behavior = -3 * generator.random(count), -3 * generator.random(count)
    advantages, weights = generator.standard_normal(count), generator.random(count)
    old_policy = "behavior" if truncation == "none" else "learner"
    settings = objective(
        loss=Ppo(eps_clip_high=0.3) if old_policy == "behavior" else Ppo(old_policy="learner"),
        correction={
            "truncation": None if truncation == "none" else {"level": truncation, "cap": 1.5},
            "band": {"below": 0.3, "above": 4.0},
            "rejection": {"above": 1.0, "level": "sequence_mean"},
        },
    )
    batch = tokens(
        *(torch.tensor(x) for x in (learner, behavior, advantages)),
        lengths=lengths,
        weights=torch.tensor(weights),
    )
    loss, sums = policy_loss(batch, settings)

    expected, masked, at = 0.0, 0, 0
    for length in lengths:
        part = slice(at, at + length)
        log_ratio, a = learner[part] - behavior[part], advantages[part]
        ratio = np.exp(log_ratio) if old_policy == "behavior" else np.ones(length)
        weight = {
            "none": np.ones(length),
            "token": np.minimum(np.exp(log_ratio), 1.5),
            "sequence": np.full(length, min(np.exp(log_ratio.sum()), 1.5)),
        }[truncation]
        keep = (
            (np.exp(log_ratio) >= 0.3)
            & (np.exp(log_ratio) <= 4.0)
            & (np.mean(np.exp(log_ratio) - 1 - log_ratio) <= 1.0)
        )
        clipped_gain = np.where(a >= 0, np.minimum(ratio, 1.3) * a, np.maximum(ratio, 0.8) * a)
        expected -= (weights[part] * keep * weight * clipped_gain).sum()
        masked += (~keep).sum()
        at += length
    assert loss.item() == pytest.approx(expected)
    assert sums.masked.item() == masked > 0
    ratio = np.exp(learner - behavior)
    assert sums.kl_k1.item() == pytest.approx((behavior - learner).sum())
    assert sums.kl_k3.item() == pytest.approx((ratio - 1 - np.log(ratio)).sum())


@pytest.mark.parametrize("loss", ["ppo", "gspo", "gmpo", "vespo", "cispo", "sapo", "dppo"])
def test_the_gradient_does_not_depend_on_how_trajectories_are_split(loss: str) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 1, 9, 4]
    weights = torch.repeat_interleave(
        torch.tensor(token_weights(lengths, "sequence_mean_token_mean", 1)), torch.tensor(lengths)
    ).double()
    logprobs, behavior, advantages = (
        torch.randn(19, generator=generator, dtype=torch.float64) * 0.5 for _ in range(3)
    )
    logprobs.requires_grad_()
    settings = objective(
        loss=loss, correction={"rejection": {"above": 0.5, "level": "sequence_mean"}}
    )
    whole, _ = policy_loss(
        tokens(logprobs, behavior, advantages, lengths=lengths, weights=weights), settings
    )
    parts, at = [], 0
    for some in ([5, 1], [9], [4]):
        cut = slice(at, at + sum(some))
        parts.append(
            policy_loss(
                tokens(
                    logprobs[cut],
                    behavior[cut],
                    advantages[cut],
                    lengths=some,
                    weights=weights[cut],
                ),
                settings,
            )[0]
        )
        at = cut.stop
    assert gradient(sum(parts), logprobs) == pytest.approx(gradient(whole, logprobs), abs=1e-12)


def test_the_entropy_bonus_raises_the_entropy() -> None:
    logprobs, entropy = tensor(-1.0, -2.0).requires_grad_(), tensor(0.5, 0.3).requires_grad_()
    batch = tokens(logprobs, logprobs.detach(), tensor(1, 1), weights=tensor(0.25, 0.75))
    without, _ = policy_loss(batch, objective(), entropy)
    with_bonus, _ = policy_loss(batch, objective(entropy_coef=0.1), entropy)
    assert (without - with_bonus).item() == pytest.approx(0.1 * (0.25 * 0.5 + 0.75 * 0.3))
    assert gradient(with_bonus, entropy) == pytest.approx([-0.025, -0.075])


def test_aggregations_on_hand_computed_numbers() -> None:
    lengths = [1, 3]
    assert token_weights(lengths, "token_mean", 10) == pytest.approx([1 / 4, 1 / 4])
    assert token_weights(lengths, "sequence_mean_token_mean", 10) == pytest.approx([1 / 2, 1 / 6])
    assert token_weights(lengths, "sequence_mean_token_sum", 10) == pytest.approx([1 / 2, 1 / 2])
    assert token_weights(lengths, "fixed", 10) == pytest.approx([1 / 20, 1 / 20])
    assert token_weights([], "token_mean", 10) == []


@pytest.mark.parametrize("aggregation", get_args(get_type_hints(token_weights)["aggregation"]))
def test_a_trajectory_without_a_loss_token_changes_no_weight(aggregation) -> None:
    assert token_weights([0, 2, 0, 6], aggregation, 10) == [
        0.0,
        *token_weights([2, 6], aggregation, 10)[:1],
        0.0,
        *token_weights([2, 6], aggregation, 10)[1:],
    ]
    assert token_weights([0, 0], aggregation, 10) == [0.0, 0.0]


def test_a_huge_log_ratio_stays_finite_and_nan_does_not_hide() -> None:
    behavior = tensor(-500.0, 0.0)
    loss, sums = policy_loss(tokens(tensor(0.0, -500.0), behavior, tensor(-1, 1)), objective())
    assert torch.isfinite(loss) and sums.nonfinite.item() == 0
    bad = tokens(tensor(0.0, 0.0), tensor(float("-inf"), float("nan")), tensor(1, 1))
    loss, sums = policy_loss(bad, objective())
    assert torch.isnan(loss) and sums.nonfinite.item() == 2
    _, sums = policy_loss(bad, objective(correction={"band": {"above": 2.0}}))
    assert sums.nonfinite.item() == 2, "a mask must not hide it"


def test_an_empty_micro_batch_has_a_loss_of_zero() -> None:
    logprobs = torch.zeros(0, requires_grad=True)
    empty = PolicyTokens(
        logprobs,
        torch.zeros(0),
        torch.zeros(0),
        torch.zeros(0),
        torch.zeros(0, dtype=torch.int64),
        0,
        torch.zeros(0),
    )
    for name in LOSSES:
        loss, sums = policy_loss(
            empty,
            objective(
                loss=name,
                correction={
                    "rejection": {"above": 1.0, "level": "sequence_max"},
                    "sequence_mask": {"above": 1.0},
                },
            ),
        )
        loss.backward()
        assert loss.item() == sums.ratio_max.item() == 0.0


def test_supervised_loss_is_the_negative_log_likelihood() -> None:
    loss, _ = supervised_loss(torch.tensor([-1.0, -2.5]), torch.tensor([0.5, 0.5]))
    assert loss.item() == 1.75


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="one shape"):
        policy_loss(tokens(torch.zeros(2), torch.zeros(3), torch.zeros(2)), objective())


def test_normalized_weights_have_mean_one() -> None:
    learner, behavior = log(0.75, 0.25, 0.9).requires_grad_(), log(0.5, 0.5, 0.3)
    chosen = objective(
        loss="reinforce",
        correction={"truncation": {"level": "token", "cap": 2.0, "normalize": True}},
    )
    weights = truncated_weights(tokens(learner, behavior, tensor(1, 1, 1)), chosen)
    assert weights.tolist() == pytest.approx([1.5, 0.5, 2.0]) and not weights.requires_grad
    loss, sums = policy_loss(
        tokens(learner, behavior, tensor(1, 1, 1)), chosen, mean_weight=weights.mean().item()
    )
    assert sums.weight.item() == pytest.approx(3.0)
    assert gradient(loss, learner) == pytest.approx([-1.5 * 0.75, -0.5 * 0.75, -2.0 * 0.75])


@pytest.mark.parametrize("mean_weight", [0.3 + 0.1 * part for part in range(30)])
def test_every_weight_that_the_cap_cuts_is_counted_whatever_the_mean_is(mean_weight) -> None:
    chosen = objective(
        loss="reinforce",
        correction={"truncation": {"level": "token", "cap": 1.7, "normalize": True}},
    )
    learner, behavior = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-2.0, -1.0, -2.7])
    ones = torch.ones(3)
    batch = PolicyTokens(
        learner, behavior, ones, ones, torch.zeros(3, dtype=torch.int64), 1, torch.zeros(3)
    )
    assert policy_loss(batch, chosen, mean_weight=mean_weight)[1].capped == 2


def test_a_weight_that_the_cap_leaves_whole_is_not_counted() -> None:
    chosen = objective(loss="reinforce", correction={"truncation": {"level": "token", "cap": 1.0}})
    known = tokens(log(0.5, 0.5), log(0.5, 0.4), tensor(1, 1))
    assert policy_loss(known, chosen)[1].capped == 1


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_in_the_loss_has_the_gradient_of_the_divergence_from_the_reference(estimator) -> None:
    """With every outcome of one token, as often as another policy samples it, the gradient is that
    of KL(learner || reference)."""
    logits = torch.tensor([0.5, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    reference, behavior = log(0.2, 0.2, 0.6), log(0.3, 0.5, 0.2)
    learner = logits.log_softmax(-1)
    known = replace(
        tokens(learner, behavior, tensor(0, 0, 0), weights=behavior.exp()),
        reference_logprobs=reference,
    )
    loss, sums = policy_loss(
        known, objective(reference={"kl_loss_coef": 0.1, "estimator": estimator, "cap": 100.0})
    )
    (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
    exact = 0.1 * (learner.exp() * (learner - reference)).sum()
    (wanted,) = torch.autograd.grad(exact, logits)
    assert found.tolist() == pytest.approx(wanted.tolist())
    if estimator != "k2":
        assert loss.item() == pytest.approx(exact.item())
    assert not sums.kl_reference.requires_grad


def test_the_kl_terms_ratio_is_capped_and_needs_a_reference() -> None:
    # π = 0.5, 0.25; π_ref = 0.25, 0.5; μ = 0.5, 0.05. The ratios are 1 and 5; the second is capped
    # at 2.
    learner, behavior = log(0.5, 0.25).requires_grad_(), log(0.5, 0.05)
    known = replace(tokens(learner, behavior, tensor(0, 0)), reference_logprobs=log(0.25, 0.5))
    loss, sums = policy_loss(known, objective(reference={"kl_loss_coef": 0.1}))
    k3 = (0.5 - 1 - math.log(0.5), 2 - 1 - math.log(2))
    assert loss.item() == pytest.approx(0.1 * (k3[0] + 2 * k3[1]))
    assert sums.kl_reference.item() == pytest.approx(sum(k3))
    # d (r · k3) / d log π = r · k3 + r · (1 - π_ref / π). A capped r is a constant.
    assert gradient(loss, learner) == pytest.approx([0.1 * (k3[0] + 1 - 0.5), 0.1 * 2 * (1 - 2)])
    none, _ = policy_loss(
        tokens(learner, behavior, tensor(0, 0)), objective(reference={"kl_loss_coef": 0.1})
    )
    assert none.item() == 0
