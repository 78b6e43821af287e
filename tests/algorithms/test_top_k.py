"""The reverse KL divergence over some tokens and the tail: by hand, and against all tokens."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from asyncrl.algorithms.logprobs import LogitMap, token_logprobs, top_logprobs
from asyncrl.algorithms.top_k import top_k_reverse_kl

THREE = (torch.tensor([0.3, -1.2, 0.9]).double(), torch.tensor([-0.5, 0.8, 0.1]).double())
"""Logits of a student and a teacher over three tokens."""


def exact(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student || teacher) [N] over the whole vocabulary, from logits [N, V]."""
    ours, theirs = student.log_softmax(-1), teacher.log_softmax(-1)
    return (ours.exp() * (ours - theirs)).sum(-1)


def over(ids: Tensor, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """The same over the tokens `ids` [N, M] and the tail, and the student's tail."""
    ours, theirs = student.log_softmax(-1), teacher.log_softmax(-1)
    return top_k_reverse_kl(ours.gather(-1, ids), theirs.gather(-1, ids))


def test_by_hand() -> None:
    student, teacher = torch.tensor([[0.5, 0.2]]).log(), torch.tensor([[0.25, 0.6]]).log()
    found, tail = top_k_reverse_kl(student, teacher)
    tail_term = 0.3 * math.log(0.3 / 0.15)
    assert found.tolist() == pytest.approx(
        [0.5 * math.log(2) + 0.2 * math.log(0.2 / 0.6) + tail_term]
    )
    assert tail.tolist() == pytest.approx([0.3])


@pytest.mark.parametrize("ids", [[0], [1], [2], [0, 2], [1, 0]])
def test_the_gradient_by_enumeration(ids: list[int]) -> None:
    """Three tokens: the gradient of the merged distributions' divergence, by finite differences."""
    student, teacher = THREE

    def merged(logits: Tensor) -> float:
        ours, theirs = logits.softmax(-1), teacher.softmax(-1)
        events = [[token] for token in ids] + [[token for token in range(3) if token not in ids]]
        sums = [(float(ours[event].sum()), float(theirs[event].sum())) for event in events]
        return sum(p * math.log(p / q) for p, q in sums)

    logits = student[None].clone().requires_grad_()
    found, _ = over(torch.tensor([ids]), logits, teacher[None])
    assert found.item() == pytest.approx(merged(student), rel=1e-9)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    for token, step in enumerate(1e-6 * torch.eye(3).double()):
        slope = (merged(student + step) - merged(student - step)) / 2e-6
        assert float(gradient[0, token]) == pytest.approx(slope, abs=1e-8)


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-5), (torch.float32, 2e-3)])
def test_with_all_tokens_it_is_the_divergence_over_the_vocabulary(
    dtype: torch.dtype, within: float
) -> None:
    """In float32, a tail of 1e-5 is known to about a percent."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (3 * torch.randn(64, 20, generator=generator).to(dtype) for _ in range(2))
    student.requires_grad_()
    wanted = exact(student, teacher)
    (wanted_gradient,) = torch.autograd.grad(wanted.sum(), student)
    for count in (19, 20):
        ids = torch.stack([torch.randperm(20, generator=generator)[:count] for _ in range(64)])
        found, tail = over(ids, student, teacher)
        torch.testing.assert_close(found, wanted, rtol=0, atol=within)
        (gradient,) = torch.autograd.grad(found.sum(), student)
        torch.testing.assert_close(gradient, wanted_gradient, rtol=0, atol=within)
    assert tail.max() < 1e-6


def test_fewer_tokens_give_a_lower_bound_that_rises_with_their_number() -> None:
    generator = torch.Generator().manual_seed(1)
    student, teacher = (2 * torch.randn(200, 30, generator=generator).double() for _ in range(2))
    ids = teacher.argsort(-1, descending=True)
    bounds = [over(ids[:, :count], student, teacher)[0] for count in (1, 2, 4, 8, 16, 29)]
    bounds.append(exact(student, teacher))
    for lower, higher in pairwise(bounds):
        assert (lower <= higher + 1e-5).all() and lower.mean() < higher.mean()
    assert (bounds[0] >= -1e-6).all()


def test_the_same_policies_give_no_divergence_and_no_gradient() -> None:
    logits = torch.randn(8, 20, generator=torch.Generator().manual_seed(2)).requires_grad_()
    found, _ = over(torch.arange(5).expand(8, 5), logits, logits.detach())
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert found.abs().max() < 1e-6 and gradient.abs().max() < 1e-6


def test_certain_policies_give_finite_gradients() -> None:
    """The tail of one policy or of both is below what float32 resolves, and one token has almost no
    probability."""
    sure, unsure = torch.tensor([60.0, 0.0, -60.0]), torch.zeros(3)
    for student, teacher in ((sure, sure), (sure, unsure), (unsure, sure), (sure, sure.flip(0))):
        logits = student[None].clone().requires_grad_()
        found, _ = over(torch.tensor([[0, 2]]), logits, teacher[None])
        (gradient,) = torch.autograd.grad(found.sum(), logits)
        assert torch.isfinite(found).all() and torch.isfinite(gradient).all()
        assert found.abs().max() < 21 and gradient.abs().max() < 21
    # An unsure student leaves the tail of a sure teacher.
    logits = unsure[None].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(over(torch.tensor([[0, 2]]), logits, sure[None])[0], logits)
    assert gradient[0, 0] < -1 and gradient[0, 1] > 0.5


def test_other_tokens_of_the_teacher_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 3\) came with \(2, 4\) of the teacher"):
        top_k_reverse_kl(torch.zeros(2, 3), torch.zeros(2, 4))


def head(rows: int = 9) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight and bias of a head, and targets."""
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(rows, 6, generator=generator),
        torch.randn(17, 6, generator=generator),
        torch.randn(17, generator=generator),
        torch.randint(0, 17, (rows,), generator=generator),
    )


@pytest.mark.parametrize("chunk_elements", [1, 60, 10_000])
def test_the_most_probable_other_tokens_in_chunks(chunk_elements: int) -> None:
    hidden, weight, bias, targets = head()
    scale = LogitMap(scale=1.5)
    own, ids, values = top_logprobs(
        hidden, weight, targets, 0.7, 4, 15, bias, chunk_elements, scale
    )
    dense = (1.5 * (hidden @ weight.T + bias) / 0.7).log_softmax(-1)
    torch.testing.assert_close(own, dense.gather(-1, targets[:, None])[:, 0])
    for row, target in enumerate(targets.tolist()):
        ranked = [at for at in dense[row].argsort(descending=True).tolist() if at < 15]
        assert ids[row].tolist() == [at for at in ranked if at != target][:4]
    torch.testing.assert_close(values, dense.gather(-1, ids))
    assert (targets >= 15).any(), "a target may be above the limit of the others"


def test_there_are_at_most_all_other_tokens() -> None:
    hidden, weight, _, targets = head()
    _, ids, values = top_logprobs(hidden, weight, targets, 1.0, 40)
    assert ids.shape == (9, 16) and torch.isfinite(values).all()
    assert all(
        target not in row for target, row in zip(targets.tolist(), ids.tolist(), strict=True)
    )
    _, none, _ = top_logprobs(hidden[:0], weight, targets[:0], 1.0, 40)
    assert none.shape == (0, 16)


def test_log_probs_of_several_tokens_in_chunks_equal_those_of_one_chunk() -> None:
    hidden, weight, bias, targets = head()
    several = torch.stack([targets, (targets + 1) % 17, (targets + 5) % 17], 1)
    found = []
    for chunk_elements in (40, 10_000):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
        logprobs, entropy = token_logprobs(
            leaves[0], leaves[1], several, 0.7, leaves[2], chunk_elements
        )
        assert logprobs.shape == (9, 3) and entropy.shape == (9,)
        gradients = torch.autograd.grad(
            (logprobs * torch.linspace(-1, 1, 27).view(9, 3)).sum(), leaves
        )
        found.append((logprobs, entropy, *gradients))
    torch.testing.assert_close(*found)
    for column in range(3):
        alone, _ = token_logprobs(hidden, weight, several[:, column], 0.7, bias)
        torch.testing.assert_close(found[0][0][:, column], alone)
