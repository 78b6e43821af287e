import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from asyncrl.algorithms.logprobs import LogitMap, greedy_tokens, token_logprobs


def test_entropy_has_a_gradient_only_with_entropy_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(6, 4, generator=generator, requires_grad=True),
        torch.randn(9, 4, generator=generator),
    )
    targets = torch.arange(6)
    assert not token_logprobs(hidden, weight, targets, 1.0)[1].requires_grad
    whole = token_logprobs(hidden, weight, targets, 1.0, entropy_gradient=True)[1]
    chunked = token_logprobs(
        hidden, weight, targets, 1.0, chunk_elements=18, entropy_gradient=True
    )[1]
    expected = torch.distributions.Categorical(logits=hidden @ weight.T).entropy()
    wanted = torch.autograd.grad(expected.sum(), hidden, retain_graph=True)[0]
    for found in (whole, chunked):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(
            torch.autograd.grad(found.sum(), hidden, retain_graph=True)[0], wanted
        )


def test_hand_computed_numbers() -> None:
    # The logits of the row are [ln 1, ln 3]. Temperature 0.5 squares their exponentials: 1 and 9.
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    logprobs, entropy = token_logprobs(hidden, weight, torch.tensor([1]), 1.0)
    assert logprobs.item() == pytest.approx(math.log(0.75))
    assert entropy.item() == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert token_logprobs(hidden, weight, torch.tensor([1]), 0.5)[0].item() == pytest.approx(
        math.log(0.9)
    )
    assert greedy_tokens(hidden, weight).tolist() == [1]


@pytest.mark.parametrize("chunk_elements", [1, 40, 10_000])
def test_chunks_against_numpy(chunk_elements: int) -> None:
    generator = np.random.default_rng(0)
    hidden, weight, bias = (
        generator.standard_normal((7, 5)),
        generator.standard_normal((13, 5)),
        generator.standard_normal(13),
    )
    targets = generator.integers(0, 13, 7)
    logits = (hidden @ weight.T + bias) / 0.7
    expected = logits - logits.max(1, keepdims=True)
    expected = expected - np.log(np.exp(expected).sum(1, keepdims=True))
    as_tensors = [torch.tensor(array, dtype=torch.float32) for array in (hidden, weight)]
    logprobs, entropy = token_logprobs(
        *as_tensors,
        torch.tensor(targets),
        0.7,
        torch.tensor(bias, dtype=torch.float32),
        chunk_elements,
    )
    np.testing.assert_allclose(logprobs, expected[np.arange(7), targets], atol=2e-6)
    np.testing.assert_allclose(entropy, -(np.exp(expected) * expected).sum(1), atol=2e-6)
    greedy = greedy_tokens(*as_tensors, torch.tensor(bias, dtype=torch.float32), chunk_elements)
    assert greedy.tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_chunks_are_exact_to_one_in_a_million(entropy_gradient: bool) -> None:
    rows, width, vocabulary = 64, 16, 500
    found = []
    for chunk_elements in (3 * vocabulary, rows * vocabulary):
        torch.manual_seed(0)
        hidden, weight = (
            torch.randn(rows, width, requires_grad=True),
            torch.randn(vocabulary, width, requires_grad=True),
        )
        bias, targets = (
            torch.randn(vocabulary, requires_grad=True),
            torch.randint(0, vocabulary, (rows,)),
        )
        logprobs, entropy = token_logprobs(
            hidden, weight, targets, 0.7, bias, chunk_elements, entropy_gradient
        )
        loss = logprobs.mean() + (entropy.mean() if entropy_gradient else 0.0)
        found.append((logprobs, entropy, *torch.autograd.grad(loss, (hidden, weight, bias))))
    for chunked, whole in zip(*found, strict=True):
        assert float((chunked - whole).abs().max()) <= 1e-6 * max(1.0, float(whole.abs().max()))


@pytest.mark.parametrize("chunks", [2, 600])
def test_the_heads_gradient_adds_up_in_float32_over_many_chunks(chunks: int) -> None:
    """In bfloat16, the part of each chunk is rounded once, and their sum must not be rounded again.
    The result is compared with whole logits in float64."""
    width, vocabulary, rows = 8, 32, 2
    torch.manual_seed(0)
    # All rows change the head in the same direction, as a policy gradient does. So the sum becomes
    # much larger than any part.
    hidden = (1 + 0.1 * torch.randn(chunks * rows, width)).bfloat16()
    weight, bias, targets = (
        torch.randn(vocabulary, width).bfloat16(),
        torch.randn(vocabulary).bfloat16(),
        torch.zeros(chunks * rows, dtype=torch.int64),
    )

    def gradients(dtype: torch.dtype, chunk_elements: int) -> tuple[torch.Tensor, ...]:
        inputs = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (hidden, weight, bias)]
        logprobs, _ = token_logprobs(inputs[0], inputs[1], targets, 1.0, inputs[2], chunk_elements)
        return torch.autograd.grad(logprobs.sum(), inputs)

    for name, found, exact in zip(
        ("hidden", "weight", "bias"),
        gradients(torch.bfloat16, rows * vocabulary),
        gradients(torch.float64, 1 << 30),
        strict=True,
    ):
        assert found.dtype == torch.bfloat16
        # Half a unit in bfloat16's last place is 0.002. The logits of each chunk are rounded too.
        assert float((found.double() - exact).norm() / exact.norm()) < 0.01, name


class LargestOutput(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returns, including the backward
    pass."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max(self.elements, *sizes) if sizes else self.elements
        return result


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize(("chunk_rows", "largest"), [(3, 3 * 500), (64, 64 * 500)])
def test_the_whole_logits_are_never_in_memory(
    chunk_rows: int, largest: int, entropy_gradient: bool
) -> None:
    """With 64 rows, a vocabulary of 500 and chunks of 3 rows, no tensor is larger than a chunk.
    With one chunk for all rows, the test sees the whole logits."""
    hidden, weight = torch.randn(64, 2, requires_grad=True), torch.randn(500, 2, requires_grad=True)
    with LargestOutput() as seen:
        logprobs, entropy = token_logprobs(
            hidden, weight, torch.arange(64), 1.0, None, chunk_rows * 500, entropy_gradient
        )
        forward, seen.elements = seen.elements, 0
        (logprobs.sum() + entropy.sum()).backward()
    assert (forward, seen.elements) == (largest, largest)


def test_chunks_do_not_change_gradients() -> None:
    torch.manual_seed(0)
    targets = torch.randint(0, 13, (7,))
    gradients = []
    for chunk_elements in (1, 10_000):
        torch.manual_seed(1)
        hidden, weight = (
            torch.randn(7, 5, requires_grad=True),
            torch.randn(13, 5, requires_grad=True),
        )
        token_logprobs(hidden, weight, targets, 0.7, chunk_elements=chunk_elements)[
            0
        ].sum().backward()
        gradients.append((hidden.grad, weight.grad))
    for whole, chunked in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, chunked)


def test_no_rows() -> None:
    logprobs, entropy = token_logprobs(
        torch.zeros(0, 5), torch.zeros(13, 5), torch.zeros(0, dtype=torch.int64), 1.0
    )
    assert (
        logprobs.shape
        == entropy.shape
        == greedy_tokens(torch.zeros(0, 5), torch.zeros(13, 5)).shape
        == (0,)
    )


def test_temperature_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature = 0"):
        token_logprobs(torch.zeros(1, 5), torch.zeros(13, 5), torch.zeros(1, dtype=torch.int64), 0)


MAPS = {
    "granite": LogitMap(scale=1 / 8),
    "cohere": LogitMap(scale=0.0625),
    "gemma 2": LogitMap(softcap=3.0),
    "both": LogitMap(2.5, 3.0),
}


@pytest.mark.parametrize("chunk_elements", [30, 10_000], ids=["chunked", "whole"])
@pytest.mark.parametrize("name", MAPS)
def test_mapped_logits_have_the_log_probs_and_gradients_of_plain_autograd_in_float64(
    name: str, chunk_elements: int
) -> None:
    """Logits reach 12, far above the soft cap of 3. The gradient is that of log-probs plus
    entropies."""
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(7, 5), 2 * torch.randn(13, 5), torch.randn(13)
    targets, direction, logit_map = torch.randint(0, 13, (7,)), torch.linspace(-1, 1, 7), MAPS[name]

    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight, bias)]
    logits = logit_map.scale * (exact[0] @ exact[1].T + exact[2])
    if logit_map.softcap is not None:
        logits = logit_map.softcap * (logits / logit_map.softcap).tanh()
    log_probs = (logits / 0.7).log_softmax(-1)
    expected = log_probs[range(7), targets], -(log_probs.exp() * log_probs).sum(-1)
    wanted = torch.autograd.grad((direction * (expected[0] + 0.1 * expected[1])).sum(), exact)

    inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    found = token_logprobs(
        inputs[0], inputs[1], targets, 0.7, inputs[2], chunk_elements, True, logit_map
    )
    gradients = torch.autograd.grad((direction * (found[0] + 0.1 * found[1])).sum(), inputs)
    for actual, reference in zip((*found, *gradients), (*expected, *wanted), strict=True):
        assert float((actual - reference).abs().max() / reference.abs().max()) < 2e-6
    assert (
        greedy_tokens(hidden, weight, bias, chunk_elements, logit_map).tolist()
        == logits.argmax(-1).tolist()
    )


def test_a_soft_cap_by_hand() -> None:
    """The logits are 0 and 4 with a cap of 2. 2 tanh 2 = 1.92806, so the second log-prob is
    -log(1 + e^-1.92806)."""
    found, _ = token_logprobs(
        torch.ones(1, 1),
        torch.tensor([[0.0], [4.0]]),
        torch.tensor([1]),
        1.0,
        logit_map=LogitMap(softcap=2.0),
    )
    assert found.item() == pytest.approx(-math.log1p(math.exp(-2 * math.tanh(2))))


@pytest.mark.parametrize("chunk_elements", [13, 1 << 20])
def test_log_probs_without_entropies_are_the_same(chunk_elements: int) -> None:
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(7, 5), torch.randn(13, 5), torch.randint(0, 13, (7,))
    with torch.no_grad():
        logprobs, entropy = token_logprobs(
            hidden, weight, targets, 0.7, chunk_elements=chunk_elements
        )
        alone, empty = token_logprobs(
            hidden, weight, targets, 0.7, chunk_elements=chunk_elements, with_entropy=False
        )
    assert torch.equal(alone, logprobs)
    assert (len(entropy), len(empty)) == (7, 0)
