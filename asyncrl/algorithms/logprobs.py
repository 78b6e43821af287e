"""Token log-probs from hidden states and the head's weight, in chunks: the logits [N, vocabulary] never exist whole."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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

    `hidden` is [N, H], `weight` [V, H], `bias` [V]. With more than one chunk the logits are computed again in the backward pass.

    Raises:
        ValueError: the temperature is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature = {temperature} has no log-probs; use one above 0")
    rows = _chunk_rows(weight, chunk_elements)
    if len(targets) <= rows:
        return _chunk(hidden, weight, targets, temperature, bias, entropy_gradient)
    outputs = [
        checkpoint(_chunk, hidden[at : at + rows], weight, targets[at : at + rows], temperature, bias, entropy_gradient, use_reentrant=False)
        for at in range(0, len(targets), rows)
    ]
    return torch.cat([logprobs for logprobs, _ in outputs]), torch.cat([entropy for _, entropy in outputs])


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
