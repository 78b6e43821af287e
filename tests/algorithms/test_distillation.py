"""The teacher's advantage: by hand, and against the gradient of the reverse KL by enumeration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from asyncrl.algorithms.distillation import reverse_kl_terms, teacher_advantages


def test_by_hand() -> None:
    behavior, teacher = np.log([0.5, 0.2, 0.9]), np.log([0.25, 0.4, 0.9])
    expected = [-0.5 * math.log(2), 0.5 * math.log(2), 0.0]
    assert teacher_advantages(behavior, teacher, 0.5) == pytest.approx(expected)
    assert reverse_kl_terms(behavior, teacher) == pytest.approx([math.log(2), -math.log(2), 0.0])


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Three tokens: E[A · ∇log π] = -coef · ∇KL(π || teacher), summed over every token."""
    logits = torch.tensor([0.3, -1.2, 0.9], dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([-0.5, 0.8, 0.1], dtype=torch.float64), -1)
    coef = 0.7
    policy = torch.log_softmax(logits, -1)
    (wanted,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits)
    policy = torch.log_softmax(logits, -1)
    known = policy.detach()
    advantages = torch.tensor(teacher_advantages(known.numpy(), teacher.numpy(), coef))
    (found,) = torch.autograd.grad((known.exp() * advantages * policy).sum(), logits)
    assert torch.allclose(found, -coef * wanted, atol=1e-12)


def test_a_token_that_the_teacher_almost_excludes_is_bounded() -> None:
    assert teacher_advantages(np.array([-1.0]), np.array([-9999.0]), 1.0).tolist() == [-20.0]


def test_the_same_policy_gives_no_advantage() -> None:
    same = np.log([0.1, 0.7])
    assert teacher_advantages(same, same, 1.0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("behavior", "teacher", "message"),
    [
        ([-1.0], [-1.0, -2.0], "1 log-probs came with 2 of the teacher"),
        ([-1.0], [math.nan], "is not finite; mask that trajectory"),
        ([-math.inf], [-1.0], "is not finite; mask that trajectory"),
    ],
)
def test_unusable_log_probs_are_refused(
    behavior: list[float], teacher: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        teacher_advantages(np.array(behavior), np.array(teacher), 1.0)
