"""Token log-probs from hidden states and the head's weight, in chunks: the logits [N, vocabulary] never exist whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["CHUNK_ELEMENTS", "greedy_tokens", "token_logprobs"]

CHUNK_ELEMENTS = 1 << 23
"""Logits of one chunk: 32 MiB in float32."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    bias: Tensor | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` [N] and entropies [N] (without gradient, unless asked for) of softmax(hidden @ weight.T / temperature), float32 nats.

    `hidden` is [N, H], `weight` [V, H], `bias` [V]. With more than one chunk the logits are computed again in the backward pass, and the gradients of
    weight and bias add up over the chunks in float32, whatever their type.

    Raises:
        ValueError: the temperature is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature = {temperature} has no log-probs; use one above 0")
    rows = _chunk_rows(weight, chunk_elements)
    if len(targets) <= rows:
        return _chunk(hidden, weight, targets, temperature, bias, entropy_gradient)
    logprobs, entropy = _Chunked.apply(hidden, weight, bias, targets, temperature, rows, entropy_gradient)
    return logprobs, entropy


class _Chunked(torch.autograd.Function):
    """`_chunk` over so many rows at a time; of a chunk only the results are kept. Left to autograd, the gradient of the head would be added up in the
    weight's own type: in bfloat16 a sum of 600 like chunks loses a sixth or more, since what is small against the sum so far is rounded away."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, rows: int, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.settings = temperature, rows, entropy_gradient
        parts = zip(hidden.split(rows), targets.split(rows), strict=True)
        found = [_chunk(part, weight, wanted, temperature, bias, False) for part, wanted in parts]
        logprobs, entropy = torch.cat([one for one, _ in found]), torch.cat([other for _, other in found])
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        temperature, rows, entropy_gradient = ctx.settings
        # Detached: a chunk's gradients come back here and reach no parameter by themselves.
        hidden, weight, bias = (tensor if tensor is None else tensor.detach().requires_grad_() for tensor in (hidden, weight, bias))
        head = [tensor for tensor in (weight, bias) if tensor is not None]
        sums = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in head]
        of_hidden = []
        for part, wanted, *of_results in zip(hidden.split(rows), targets.split(rows), *(gradient.split(rows) for gradient in outer), strict=True):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                results = _chunk(part, weight, wanted, temperature, bias, entropy_gradient)
            of_part, *of_head = torch.autograd.grad(results[: 1 + entropy_gradient], [part, *head], of_results[: 1 + entropy_gradient])
            of_hidden.append(of_part)
            for total, gradient in zip(sums, of_head, strict=True):
                total += gradient
        found = [total.to(tensor.dtype) for total, tensor in zip(sums, head, strict=True)]
        return torch.cat(of_hidden), found[0], found[1] if bias is not None else None, None, None, None, None


@torch.no_grad()
def greedy_tokens(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, chunk_elements: int = CHUNK_ELEMENTS) -> Tensor:
    """The most probable next token [N] for each row of `hidden` [N, H]; the lowest id wins a tie."""
    rows = _chunk_rows(weight, chunk_elements)
    return torch.cat([_logits(hidden[at : at + rows], weight, bias).argmax(-1) for at in range(0, max(1, len(hidden)), rows)])


def _chunk_rows(weight: Tensor, chunk_elements: int) -> int:
    return max(1, chunk_elements // weight.shape[0])


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(hidden, weight, bias).float()


def _chunk(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, bias: Tensor | None, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
    log_probs = torch.log_softmax(_logits(hidden, weight, bias) / temperature, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy
