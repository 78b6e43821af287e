import math

import numpy as np
import pytest
import torch

from asyncrl.algorithms.losses import policy_loss, supervised_loss


def log(*values: float) -> torch.Tensor:
    return torch.tensor([math.log(value) for value in values], dtype=torch.float64)


def test_policy_loss_on_hand_computed_numbers() -> None:
    # ratios 1.5, 0.5, 1.5, 0.5, 1.1 with clip range [0.8, 1.28]
    learner, behaviour = log(0.75, 0.25, 0.75, 0.25, 0.55), log(0.5, 0.5, 0.5, 0.5, 0.5)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0], dtype=torch.float64)
    # min(1.5, 1.28), min(0.5, 0.8), min(-1.5, -1.28), min(-0.5, -0.8), min(2.2, 2.2)
    expected = -(1.28 + 0.5 - 1.5 - 0.8 + 2.2)
    loss, sums = policy_loss(learner.requires_grad_(), behaviour, advantages, 0.2, 0.28)
    assert loss.item() == pytest.approx(expected)
    assert sums.clipped.item() == 2
    assert sums.ratio.item() == pytest.approx(5.1)
    assert sums.ratio_max.item() == pytest.approx(1.5)
    loss.backward()
    # A clipped token has no gradient; another has -r·A.
    assert learner.grad is not None
    assert learner.grad.tolist() == pytest.approx([0.0, -0.5, 1.5, 0.0, -2.2])


def test_at_the_behaviour_policy_the_gradient_is_the_policy_gradient() -> None:
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    loss, sums = policy_loss(logprobs, logprobs.detach(), torch.tensor([0.5, -2.0]), 0.2, 0.28)
    loss.backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([-0.5, 2.0])
    assert sums.kl_k1.item() == sums.kl_k3.item() == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_policy_loss_against_numpy(seed: int) -> None:
    generator = np.random.default_rng(seed)
    learner, behaviour = -3 * generator.random(100), -3 * generator.random(100)
    advantages = generator.standard_normal(100)
    loss, sums = policy_loss(torch.tensor(learner), torch.tensor(behaviour), torch.tensor(advantages), 0.2, 0.3)
    ratio = np.exp(learner - behaviour)
    objective = np.where(advantages >= 0, np.minimum(ratio, 1.3) * advantages, np.maximum(ratio, 0.8) * advantages)
    assert loss.item() == pytest.approx(-objective.sum())
    assert sums.kl_k1.item() == pytest.approx((behaviour - learner).sum())
    assert sums.kl_k3.item() == pytest.approx((ratio - 1 - np.log(ratio)).sum())


def test_a_huge_log_ratio_stays_finite_and_nan_does_not_hide() -> None:
    behaviour = torch.tensor([-500.0, 0.0])
    loss, sums = policy_loss(torch.tensor([0.0, -500.0]), behaviour, torch.tensor([-1.0, 1.0]), 0.2, 0.28)
    assert torch.isfinite(loss) and sums.nonfinite.item() == 0
    loss, sums = policy_loss(torch.tensor([0.0, 0.0]), torch.tensor([float("-inf"), float("nan")]), torch.tensor([1.0, 1.0]), 0.2, 0.28)
    assert torch.isnan(loss) and sums.nonfinite.item() == 2


def test_supervised_loss_is_the_negative_log_likelihood() -> None:
    loss, _ = supervised_loss(torch.tensor([-1.0, -2.5]))
    assert loss.item() == 3.5


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="one shape"):
        policy_loss(torch.zeros(2), torch.zeros(3), torch.zeros(2), 0.2, 0.2)
