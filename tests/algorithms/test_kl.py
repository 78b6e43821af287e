"""KL estimates by hand, and the numpy form of scoring workers against the torch form of the learner."""

import math

import numpy as np
import pytest
import torch

from asyncrl.algorithms.corrections import kl_estimate
from asyncrl.algorithms.kl import reward_kl


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", -math.log(2) + math.log(4)),
        ("k2", math.log(2) ** 2 / 2 + math.log(4) ** 2 / 2),
        ("k3", (2 - 1 - math.log(2)) + (0.25 - 1 + math.log(4))),
        ("low_var", (2 - 1 - math.log(2)) + (0.25 - 1 + math.log(4))),
    ],
)
def test_estimates_by_hand(estimator, expected):
    # π_ref / μ = 2 and 1/4
    assert reward_kl([math.log(0.25), math.log(0.8)], [math.log(0.5), math.log(0.2)], estimator) == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var"])
def test_numpy_and_torch_agree_far_apart_too(estimator):
    generator = np.random.default_rng(0)
    ours, theirs = -3 * generator.random(50), -30 * generator.random(50)
    theirs[0], ours[1] = 0.0, -40.0
    log_ratio = torch.from_numpy(theirs - ours)
    assert reward_kl(ours, theirs, estimator) == pytest.approx(kl_estimate(log_ratio, estimator).sum().item())


def test_low_var_is_bounded_per_token():
    assert reward_kl([-15.0, -15.0], [0.0, -15.0], "low_var") == 10.0


def test_equal_policies_have_none():
    assert [reward_kl([-1.0, -2.0], [-1.0, -2.0], estimator) for estimator in ("k1", "k2", "k3", "low_var")] == [0, 0, 0, 0]


def test_k1_and_k3_are_unbiased():
    """The mean over all outcomes is the divergence itself."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    exact = float((p * np.log(p / q)).sum())
    for estimator in ("k1", "k3"):
        assert sum(weight * reward_kl([math.log(a)], [math.log(b)], estimator) for weight, a, b in zip(p, p, q, strict=True)) == pytest.approx(exact)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="2 log-probs came with 1"):
        reward_kl([0.0, 0.0], [0.0], "k1")
