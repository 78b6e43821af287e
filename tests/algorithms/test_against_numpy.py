"""Compares every loss, correction and advantage with an independent numpy implementation, which
handles one trajectory at a time. Lengths differ, and some trajectories are masked."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import Advantage, GroupInputs, group_advantages
from asyncrl.algorithms.advantages.over_step import normalized, standardized
from asyncrl.algorithms.corrections import Truncation
from asyncrl.algorithms.objective import policy_loss, token_weights
from asyncrl.algorithms.overlong import Overlong
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.config import PolicyGradient
from asyncrl.contracts.section import kinds_of, name_of

LENGTHS = [1, 7, 30, 3, 12, 2, 18, 5]
MASKS: tuple[dict[str, Any], ...] = (
    {},
    {"band": {"below": 0.4, "above": 3.0}},
    *(
        {"rejection": {"above": 0.6 if e == "k1" else 0.2, "estimator": e, "level": v}}
        for e in ("k1", "k2", "k3")
        for v in ("token", "sequence_sum", "sequence_mean", "sequence_max")
    ),
    {"sequence_mask": {"above": 0.05}},
    {"band": {"below": 0.2}, "rejection": {"above": 2.0}, "sequence_mask": {"above": 0.1}},
)
LOSSES: tuple[dict[str, Any], ...] = (
    {"name": "ppo"},
    {"name": "ppo", "dual_clip": 1.6, "eps_clip": 0.1, "eps_clip_high": 0.4},
    {"name": "ppo", "old_policy": "learner"},
    {"name": "ppo", "old_policy": "log_linear"},
    {"name": "gspo", "eps_clip": 0.05, "eps_clip_high": 0.07},
    {"name": "gmpo"},
    {"name": "gmpo", "eps_clip": 0.33, "eps_clip_high": 0.49},
    {"name": "vespo"},
    {"name": "vespo", "k_positive": 1.0, "lambda_negative": 0.5},
    {"name": "cispo"},
    {"name": "cispo", "eps_clip": 0.3},
    {"name": "sapo", "tau_positive": 0.8, "tau_negative": 1.3},
    {"name": "dppo", "threshold": 0.1},
    {"name": "reinforce"},
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
    known: dict[str, np.ndarray], weights: np.ndarray, a: PolicyGradient, mean_weight: float
) -> tuple[float, np.ndarray]:
    """Compute the step's loss and mask from the papers' formulas, one trajectory at a time."""
    total, dropped, start = 0.0, [], 0
    loss: Any = a.loss
    c, kl = a.correction, a.reference
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
        }[loss.old_policy]
        r = np.exp(pi - old)
        low, high = 1 - getattr(loss, "eps_clip", 0.2), 1 + getattr(loss, "eps_clip_high", 0.28)
        if loss.name == "ppo":
            objective = [
                min(x * y, min(max(x, low), high) * y) for x, y in zip(r, adv, strict=True)
            ]
            if loss.dual_clip is not None:
                objective = [
                    max(o, loss.dual_clip * y) if y < 0 else o
                    for o, y in zip(objective, adv, strict=True)
                ]
        elif loss.name == "gspo":
            s = np.exp(np.mean(pi - old))
            objective = [min(s * y, min(max(s, low), high) * y) for y in adv]
        elif loss.name == "gmpo":
            bounded = [min(x, high) if y > 0 else max(x, low) for x, y in zip(r, adv, strict=True)]
            objective = [np.prod(bounded) ** (1 / length) * y for y in adv]
        elif loss.name == "vespo":
            product = np.prod(r)
            k, lam = (
                (loss.k_positive, loss.lambda_positive)
                if adv[0] >= 0
                else (loss.k_negative, loss.lambda_negative)
            )
            objective = list(product**k * np.exp(lam * (1 - product)) * adv * pi)
        elif loss.name == "cispo":
            objective = [min(max(x, low), high) * y * p for x, y, p in zip(r, adv, pi, strict=True)]
        elif loss.name == "sapo":
            objective = []
            for x, y in zip(r, adv, strict=True):
                tau = loss.tau_positive if y > 0 else loss.tau_negative
                objective.append(4 / tau / (1 + np.exp(-tau * (x - 1))) * y)
        elif loss.name == "dppo":
            moved = np.exp(pi) - np.exp(mu)
            objective = [
                (
                    0.0
                    if (y > 0 and m > loss.threshold) or (y < 0 and m < -loss.threshold)
                    else x * y
                )
                for x, y, m in zip(r, adv, moved, strict=True)
            ]
        else:
            objective = list(adv * pi)
        way, t = old - mu, c.truncation or Truncation()
        truncated = {
            None: np.ones(length),
            "token": np.clip(np.exp(way), t.floor, t.cap),
            "sequence": np.full(length, np.clip(np.exp(way.sum()), t.floor, t.cap)),
            "geometric": np.full(length, np.clip(np.exp(way.mean()), t.floor, t.cap)),
        }[c.truncation and t.level]
        log_ratio = pi - mu
        keep = np.ones(length, dtype=bool)
        if c.band is not None and c.band.below is not None:
            keep &= np.exp(log_ratio) >= c.band.below
        if c.band is not None and c.band.above is not None:
            keep &= np.exp(log_ratio) <= c.band.above
        if c.rejection is not None:
            k = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": np.exp(log_ratio) - 1 - log_ratio}[
                c.rejection.estimator
            ]
            judged = {
                "token": np.abs(k),
                "sequence_sum": abs(k.sum()),
                "sequence_mean": abs(k.mean()),
                "sequence_max": np.abs(k).max(),
            }[c.rejection.level]
            keep &= judged <= c.rejection.above
        if c.sequence_mask is not None:
            keep &= (adv >= 0) | (np.mean(-log_ratio) <= c.sequence_mask.above)
        total -= float(np.sum(w * keep * truncated / mean_weight * np.array(objective)))
        if kl is not None:
            x = ref - pi
            k = {
                "k1": -x,
                "k2": x**2 / 2,
                "k3": np.exp(x) - 1 - x,
                "low_var": np.minimum(np.exp(x) - 1 - x, 10),
            }[kl.estimator]
            total += kl.coef * float(np.sum(w * np.minimum(np.exp(log_ratio), kl.cap) * k))
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
    corrected = settings.get("old_policy") or settings["name"] == "reinforce"
    truncations = [None, "token", "sequence", "geometric"] if corrected else [None]
    any_dropped = False
    for seed, level in itertools.product(range(3), truncations):
        truncation = {"level": level, "cap": 1.2, "floor": 0.9 if seed == 2 else 0.0}
        algorithm = PolicyGradient.model_validate(
            {"loss": settings, "correction": {**masks, "truncation": truncation if level else None}}
        )
        known = drawn(seed)
        weights = np.repeat(token_weights(LENGTHS, "sequence_mean_token_mean", 1), LENGTHS)
        loss, sums = policy_loss(torch_tokens(known, weights, reference=False), algorithm)
        expected, dropped = numpy_loss(known, weights, algorithm, 1.0)
        assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert float(sums.masked) == dropped.sum() and not dropped.all()
        any_dropped |= bool(dropped.any())
    assert any_dropped == bool(masks)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var"])
@pytest.mark.parametrize("mean_weight", [1.0, 0.7])
def test_kl_in_the_loss_and_normalized_weights(estimator: str, mean_weight: float) -> None:
    algorithm = PolicyGradient.model_validate(
        {
            "loss": "reinforce",
            "reference": {"kl_loss_coef": 0.3, "estimator": estimator, "cap": 1.4},
            "correction": {"truncation": {"level": "token", "cap": 1.4}},
        }
    )
    known, weights = drawn(5), np.random.default_rng(1).random(sum(LENGTHS))
    loss, sums = policy_loss(
        torch_tokens(known, weights, reference=True), algorithm, mean_weight=mean_weight
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
    corrected = settings.get("old_policy") or settings["name"] == "reinforce"
    algorithm = PolicyGradient.model_validate(
        {
            "loss": settings,
            "reference": {"kl_loss_coef": 0.1},
            "correction": {
                "truncation": "sequence" if corrected else None,
                "band": {"below": 0.5},
                "sequence_mask": {"above": 0.1},
            },
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
            loss, _ = policy_loss(tokens, algorithm)
            losses.append(loss.item())
            gradients.append(torch.autograd.grad(loss, tokens.logprobs)[0].numpy())
        return sum(losses), np.concatenate(gradients)

    whole, whole_gradient = loss_and_gradient(range(8))
    split, split_gradient = loss_and_gradient(range(1), range(1, 4), range(4, 8))
    assert split == pytest.approx(whole, rel=1e-12)
    np.testing.assert_allclose(split_gradient, whole_gradient, rtol=1e-12, atol=1e-15)


METHODS = [name for kind in kinds_of(Advantage) if (name := name_of(kind))]
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
def test_advantages_with_masked_members(method: str, seed: int) -> None:
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
        baseline=0.375,
    )
    own = {"pass_k": 3, "pass_threshold": 0.6} if method == "pass_at_k" else {}
    algorithm = PolicyGradient.model_validate({"advantage": {"name": method, **own}})
    found = group_advantages(all_rewards, usable.tolist(), algorithm.advantage, inputs)
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
        normalized(advantages.tolist(), tokens.tolist()), expected, rtol=1e-9
    )
    np.testing.assert_allclose(standardized(advantages, every), expected, rtol=1e-9)
    for length in range(1, 21):
        by_hand = 0.0 if length <= 15 else -0.5 * (length - 15) / 5
        assert Overlong(buffer=5, penalty=0.5).added(length, 20) == pytest.approx(by_hand)
