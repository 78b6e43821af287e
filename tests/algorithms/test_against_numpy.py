"""Compares every loss, correction and advantage with an independent numpy implementation, which
handles one trajectory at a time. Lengths differ, and some trajectories are masked."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import (
    Advantage,
    GroupInputs,
    batch_normalized,
    group_advantages,
    moments_over_ranks,
    soft_overlong_penalty,
    standardized,
)
from asyncrl.algorithms.objective import PolicyTokens, policy_loss, token_weights
from asyncrl.config import AlgorithmConfig
from asyncrl.preflight.specs import objective_spec

LENGTHS = [1, 7, 30, 3, 12, 2, 18, 5]
MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"mask_below": 0.4, "mask_above": 3.0},
    *(
        {"reject_above": 0.6 if e == "k1" else 0.2, "reject_estimator": e, "reject_level": v}
        for e in ("k1", "k2", "k3")
        for v in ("token", "sequence_sum", "sequence_mean", "sequence_max")
    ),
    {"sequence_mask_above": 0.05},
    {"mask_below": 0.2, "reject_above": 2.0, "sequence_mask_above": 0.1},
)
LOSSES: tuple[dict[str, Any], ...] = (
    {"loss": "ppo"},
    {"loss": "ppo", "dual_clip": 1.6, "eps_clip": 0.1, "eps_clip_high": 0.4},
    {"loss": "ppo", "old_policy": "learner"},
    {"loss": "ppo", "old_policy": "log_linear"},
    {"loss": "gspo", "eps_clip": 0.05, "eps_clip_high": 0.07},
    {"loss": "gmpo"},
    {"loss": "gmpo", "eps_clip": 0.33, "eps_clip_high": 0.49},
    {"loss": "vespo"},
    {"loss": "vespo", "vespo_k_positive": 1.0, "vespo_lambda_negative": 0.5},
    {"loss": "cispo"},
    {"loss": "cispo", "eps_clip": 0.3},
    {"loss": "sapo", "tau_positive": 0.8, "tau_negative": 1.3},
    {"loss": "dppo", "dppo_threshold": 0.1},
    {"loss": "reinforce", "old_policy": "learner"},
)


def drawn(seed: int) -> dict[str, np.ndarray]:
    """Draw log-probs, ages, and advantages of both signs for every token."""
    generator = np.random.default_rng(seed)
    count = sum(LENGTHS)
    learner = -2 * generator.random(count)
    ages = np.concatenate([np.sort(generator.integers(0, 4, length))[::-1] for length in LENGTHS])
    advantages = np.repeat(generator.standard_normal(len(LENGTHS)), LENGTHS)
    behavior = learner + 0.5 * generator.standard_normal(count)
    return {
        "learner": learner,
        "behavior": behavior,
        "advantages": advantages,
        "ages": ages.astype(float),
        "reference": learner - generator.random(count),
    }


def numpy_loss(
    known: dict[str, np.ndarray], weights: np.ndarray, a: AlgorithmConfig, mean_weight: float
) -> tuple[float, np.ndarray]:
    """Compute the step's loss and mask from the papers' formulas, one trajectory at a time."""
    total, dropped, start = 0.0, [], 0
    c = a.correction
    for length in LENGTHS:
        part = slice(start, start + length)
        start += length
        pi, mu, adv, age, ref, w = (
            x[part]
            for x in (
                known["learner"],
                known["behavior"],
                known["advantages"],
                known["ages"],
                known["reference"],
                weights,
            )
        )
        old = {
            "behavior": mu,
            "learner": pi,
            "log_linear": np.array(
                [
                    p if t == 0 else m + (t - 1) / t * (p - m)
                    for p, m, t in zip(pi, mu, age, strict=True)
                ]
            ),
        }[a.old_policy]
        r = np.exp(pi - old)
        high, low = (
            1 + a.eps_clip_high,
            ({"cispo": 0.0}.get(a.loss, 0.8) if a.eps_clip is None else 1 - a.eps_clip),
        )
        if a.loss == "ppo":
            objective = [
                min(x * y, min(max(x, low), high) * y) for x, y in zip(r, adv, strict=True)
            ]
            if a.dual_clip is not None:
                objective = [
                    max(o, a.dual_clip * y) if y < 0 else o
                    for o, y in zip(objective, adv, strict=True)
                ]
        elif a.loss == "gspo":
            s = np.exp(np.mean(pi - old))
            objective = [min(s * y, min(max(s, low), high) * y) for y in adv]
        elif a.loss == "gmpo":
            bounded = [min(x, high) if y > 0 else max(x, low) for x, y in zip(r, adv, strict=True)]
            objective = [np.prod(bounded) ** (1 / length) * y for y in adv]
        elif a.loss == "vespo":
            product = np.prod(r)
            k, lam = (
                (a.vespo_k_positive, a.vespo_lambda_positive)
                if adv[0] >= 0
                else (a.vespo_k_negative, a.vespo_lambda_negative)
            )
            objective = list(product**k * np.exp(lam * (1 - product)) * adv * pi)
        elif a.loss == "cispo":
            objective = [min(max(x, low), high) * y * p for x, y, p in zip(r, adv, pi, strict=True)]
        elif a.loss == "sapo":
            objective = []
            for x, y in zip(r, adv, strict=True):
                tau = a.tau_positive if y > 0 else a.tau_negative
                objective.append(4 / tau / (1 + np.exp(-tau * (x - 1))) * y)
        elif a.loss == "dppo":
            moved = np.exp(pi) - np.exp(mu)
            objective = [
                (
                    0.0
                    if (y > 0 and m > a.dppo_threshold) or (y < 0 and m < -a.dppo_threshold)
                    else x * y
                )
                for x, y, m in zip(r, adv, moved, strict=True)
            ]
        else:
            objective = list(adv * pi)
        way = old - mu
        truncated = {
            "none": np.ones(length),
            "token": np.clip(np.exp(way), c.floor, c.cap),
            "sequence": np.full(length, np.clip(np.exp(way.sum()), c.floor, c.cap)),
            "geometric": np.full(length, np.clip(np.exp(way.mean()), c.floor, c.cap)),
        }[c.truncation]
        log_ratio = pi - mu
        keep = np.ones(length, dtype=bool)
        if c.mask_below is not None:
            keep &= np.exp(log_ratio) >= c.mask_below
        if c.mask_above is not None:
            keep &= np.exp(log_ratio) <= c.mask_above
        if c.reject_above is not None:
            k = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": np.exp(log_ratio) - 1 - log_ratio}[
                c.reject_estimator
            ]
            judged = {
                "token": np.abs(k),
                "sequence_sum": abs(k.sum()),
                "sequence_mean": abs(k.mean()),
                "sequence_max": np.abs(k).max(),
            }[c.reject_level]
            keep &= judged <= c.reject_above
        if c.sequence_mask_above is not None:
            keep &= (adv >= 0) | (np.mean(-log_ratio) <= c.sequence_mask_above)
        total -= float(np.sum(w * keep * truncated / mean_weight * np.array(objective)))
        if a.kl_loss_coef:
            x = ref - pi
            k = {
                "k1": -x,
                "k2": x**2 / 2,
                "k3": np.exp(x) - 1 - x,
                "low_var": np.minimum(np.exp(x) - 1 - x, 10),
            }[a.kl_estimator]
            total += a.kl_loss_coef * float(np.sum(w * np.minimum(np.exp(log_ratio), c.cap) * k))
        dropped.append(~keep)
    return total, np.concatenate(dropped)


def torch_tokens(
    known: dict[str, np.ndarray],
    weights: np.ndarray,
    reference: bool,
    which: range = range(len(LENGTHS)),
) -> PolicyTokens:
    """Select the tokens of some trajectories."""
    begins = np.concatenate([[0], np.cumsum(LENGTHS)])
    places = np.concatenate([np.arange(begins[index], begins[index + 1]) for index in which])
    sequence = torch.repeat_interleave(
        torch.arange(len(which)), torch.tensor([LENGTHS[index] for index in which])
    )
    pi, mu, adv, age, ref, w = (
        torch.tensor(x[places])
        for x in (
            *(known[k] for k in ("learner", "behavior", "advantages", "ages", "reference")),
            weights,
        )
    )
    return PolicyTokens(
        pi.requires_grad_(), mu, adv, w, sequence, len(which), age, ref if reference else None
    )


@pytest.mark.parametrize(
    ("settings", "masks"),
    list(itertools.product(LOSSES, MASKS)),
    ids=lambda value: "-".join(map(str, value.values())) or "none",
)
def test_policy_losses(settings: dict[str, Any], masks: dict[str, Any]) -> None:
    truncations = (
        ["none"]
        if settings.get("old_policy", "behavior") == "behavior"
        else ["none", "token", "sequence", "geometric"]
    )
    any_dropped = False
    for seed, truncation in itertools.product(range(3), truncations):
        algorithm = AlgorithmConfig.model_validate(
            {
                **settings,
                "correction": {
                    **masks,
                    "truncation": truncation,
                    "cap": 1.2,
                    "floor": 0.9 if seed == 2 else 0.0,
                },
            }
        )
        known = drawn(seed)
        weights = np.repeat(token_weights(LENGTHS, "sequence_mean_token_mean", 1), LENGTHS)
        loss, sums = policy_loss(
            torch_tokens(known, weights, reference=False), objective_spec(algorithm)
        )
        expected, dropped = numpy_loss(known, weights, algorithm, 1.0)
        assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert float(sums.masked) == dropped.sum() and not dropped.all()
        any_dropped |= bool(dropped.any())
    assert any_dropped == bool(masks)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var"])
@pytest.mark.parametrize("mean_weight", [1.0, 0.7])
def test_kl_in_the_loss_and_normalized_weights(estimator: str, mean_weight: float) -> None:
    algorithm = AlgorithmConfig.model_validate(
        {
            "loss": "reinforce",
            "old_policy": "learner",
            "kl_loss_coef": 0.3,
            "kl_estimator": estimator,
            "correction": {"truncation": "token", "cap": 1.4},
        }
    )
    known, weights = drawn(5), np.random.default_rng(1).random(sum(LENGTHS))
    loss, sums = policy_loss(
        torch_tokens(known, weights, reference=True),
        objective_spec(algorithm),
        mean_weight=mean_weight,
    )
    assert loss.item() == pytest.approx(
        numpy_loss(known, weights, algorithm, mean_weight)[0], rel=1e-9
    )
    assert float(sums.capped) == (np.exp(known["learner"] - known["behavior"]) > 1.4).sum() > 0


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "sequence_mean_token_sum", "sequence_mean_token_mean", "fixed"]
)
@pytest.mark.parametrize("settings", LOSSES, ids=lambda value: "-".join(map(str, value.values())))
def test_any_split_into_micro_batches_and_ranks_has_the_loss_and_gradient_of_the_whole(
    aggregation: Any, settings: dict[str, Any]
) -> None:
    """Weights come from the whole step, so sums over micro-batches and ranks are exact for any
    mask."""
    truncation = "none" if settings.get("old_policy", "behavior") == "behavior" else "sequence"
    algorithm = AlgorithmConfig.model_validate(
        {
            **settings,
            "kl_loss_coef": 0.1,
            "correction": {"truncation": truncation, "mask_below": 0.5, "sequence_mask_above": 0.1},
        }
    )
    known = drawn(3)
    weights = np.repeat(token_weights(LENGTHS, aggregation, 32), LENGTHS)
    lengths = np.array(LENGTHS)
    by_hand = {
        "token_mean": np.full(len(lengths), 1 / lengths.sum()),
        "sequence_mean_token_sum": np.full(len(lengths), 1 / len(lengths)),
        "sequence_mean_token_mean": 1 / len(lengths) / lengths,
        "fixed": np.full(len(lengths), 1 / len(lengths) / 32),
    }[aggregation]
    np.testing.assert_allclose(weights, np.repeat(by_hand, lengths))

    def loss_and_gradient(*parts: range) -> tuple[float, np.ndarray]:
        losses, gradients = [], []
        for part in parts:
            tokens = torch_tokens(known, weights, reference=True, which=part)
            loss, _ = policy_loss(tokens, objective_spec(algorithm))
            losses.append(loss.item())
            gradients.append(torch.autograd.grad(loss, tokens.logprobs)[0].numpy())
        return sum(losses), np.concatenate(gradients)

    whole, whole_gradient = loss_and_gradient(range(8))
    split, split_gradient = loss_and_gradient(range(1), range(1, 4), range(4, 8))
    assert split == pytest.approx(whole, rel=1e-12)
    np.testing.assert_allclose(split_gradient, whole_gradient, rtol=1e-12, atol=1e-15)


METHODS: tuple[Advantage, ...] = get_args(Advantage)
LENGTHS_OF_GROUP = [3, 1, 4, 1, 5, 9, 2, 6, 5]


def over_all_subsets(rewards: np.ndarray, k: int, threshold: float) -> list[float]:
    """GRPO's advantage of every subset of k trajectories, averaged over those of each one."""
    subsets = list(itertools.combinations(range(len(rewards)), min(k, len(rewards))))
    passed = np.array([float(max(rewards[list(subset)]) >= threshold) for subset in subsets])
    advantages = (passed - passed.mean()) / (passed.std() + 1e-6)
    return [
        float(np.mean([a for a, subset in zip(advantages, subsets, strict=True) if at in subset]))
        for at in range(len(rewards))
    ]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(4))
def test_advantages_with_masked_members(method: Advantage, seed: int) -> None:
    generator = np.random.default_rng(seed)
    rewards, usable = generator.random(9), generator.random(9) < 0.7
    parts = generator.random((2, 9))
    kept, kept_parts = rewards[usable], parts[:, usable]
    weighted = [
        weight * (part - part.mean()) / (part.std() + 1e-6)
        for weight, part in zip((2.0, -0.5), kept_parts, strict=True)
    ]
    kept_lengths = np.array(LENGTHS_OF_GROUP)[usable]
    subsets = over_all_subsets(kept, 3, 0.6)
    expected = {
        "grpo_batch_std": lambda x: x - kept.mean(),
        "gdpo": lambda x: sum(weighted)[list(kept).index(x)],
        "opo": lambda x: x - (kept * kept_lengths).sum() / kept_lengths.sum(),
        "pass_at_k": lambda x: subsets[list(kept).index(x)],
        "grpo": lambda x: (x - kept.mean()) / (kept.std() + 1e-6),
        "dr_grpo": lambda x: x - kept.mean(),
        "rloo": lambda x: x - (kept.sum() - x) / (len(kept) - 1),
        "remax": lambda x: x - 0.375,
        "maxrl": lambda x: (x - kept.mean()) / (kept.mean() + 1e-6),
        "reinforce_plus_plus": lambda x: x,
        "reinforce_plus_plus_baseline": lambda x: x - kept.mean(),
        "gae": lambda x: x,
    }[method]
    all_rewards = [
        float(reward) if use else None for reward, use in zip(rewards, usable, strict=True)
    ]
    inputs = GroupInputs(
        LENGTHS_OF_GROUP,
        [(2.0, parts[0].tolist()), (-0.5, parts[1].tolist())],
        k=3,
        pass_threshold=0.6,
        baseline=0.375,
    )
    found = group_advantages(all_rewards, usable.tolist(), method, inputs)
    assert [value is None for value in found] == [not use for use in usable]
    np.testing.assert_allclose(
        [value for value in found if value is not None], [expected(x) for x in kept], rtol=1e-9
    )


def test_normalization_over_the_step_and_the_overlong_penalty() -> None:
    generator = np.random.default_rng(0)
    advantages, tokens = generator.standard_normal(6), np.array([1, 4, 2, 9, 3, 1])
    every = np.repeat(advantages, tokens)
    expected = (advantages - every.mean()) / (every.std() + 1e-6)
    np.testing.assert_allclose(
        batch_normalized(advantages.tolist(), tokens.tolist()), expected, rtol=1e-9
    )
    np.testing.assert_allclose(
        standardized(advantages, *moments_over_ranks(every, lambda sums: sums)), expected, rtol=1e-9
    )
    for length in range(1, 21):
        by_hand = 0.0 if length <= 15 else -0.5 * (length - 15) / 5
        assert soft_overlong_penalty(length, 20, 5, 0.5) == pytest.approx(by_hand)
