"""Token log-probs from hidden states and the head's weight, in chunks: the logits [N, vocabulary]
never exist whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "CHUNK_ELEMENTS",
    "IDENTITY",
    "LIVE_CHUNKS",
    "PLAIN_HEAD",
    "HeadSettings",
    "LogitMap",
    "chunk_elements",
    "greedy_tokens",
    "token_logprobs",
]

LIVE_CHUNKS = 7
"""Float32 tensors of the size of a chunk of logits that are alive at once in the backward pass.
`benchmarks/memory.py` prints how many: 6.8."""
CHUNK_ELEMENTS = 1 << 23
"""Logits of one chunk, by default: 224 MiB for all that is alive of it."""


def chunk_elements(memory_bytes: int) -> int:
    """Logits of one chunk, so that all that is alive of it takes at most so many bytes."""
    return memory_bytes // (4 * LIVE_CHUNKS)


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """How a policy computes log-probs from its last hidden states."""

    chunk_elements: int = CHUNK_ELEMENTS
    fp32: bool = False
    """Compute the logits in float32, whatever type the model has."""


PLAIN_HEAD = HeadSettings()


@dataclass(frozen=True, slots=True)
class LogitMap:
    """What a model does to its logits after the head: z → softcap * tanh(scale * z / softcap)."""

    scale: float = 1.0
    softcap: float | None = None
    """None = no cap: z → scale * z."""

    def __call__(self, logits: Tensor) -> Tensor:
        """The mapped logits, of the same shape."""
        scaled = logits if self.scale == 1.0 else logits * self.scale
        return scaled if self.softcap is None else torch.tanh(scaled / self.softcap) * self.softcap


IDENTITY = LogitMap()


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    bias: Tensor | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
    entropy_gradient: bool = False,
    logit_map: LogitMap = IDENTITY,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` [N] and entropies [N] (without gradient, unless asked for) of
    softmax(logit_map(hidden @ weight.T + bias) / temperature), float32 nats.

    `hidden` is [N, H], `weight` [V, H], `bias` [V]. With more than one chunk the logits are
    computed again in the backward pass, and the gradients of weight and bias add up over the chunks
    in float32, whatever their type.

    Raises:
        ValueError: the temperature is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature = {temperature} has no log-probs; use one above 0")
    rows = _chunk_rows(weight, chunk_elements)
    if len(targets) <= rows:
        return _chunk(hidden, weight, targets, temperature, bias, entropy_gradient, logit_map)
    logprobs, entropy = _Chunked.apply(
        hidden, weight, bias, targets, temperature, rows, entropy_gradient, logit_map
    )  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _Chunked(torch.autograd.Function):
    """`_chunk` over so many rows at a time; of a chunk only the results are kept. Left to autograd,
    the gradient of the head would be added up in the weight's own type: in bfloat16 a sum of 600
    like chunks loses a sixth or more, since what is small against the sum so far is rounded away.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        rows: int,
        entropy_gradient: bool,
        logit_map: LogitMap,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.settings = temperature, rows, entropy_gradient, logit_map
        found = [
            _chunk(hidden[chunk], weight, targets[chunk], temperature, bias, False, logit_map)
            for chunk in _chunks(len(targets), rows)
        ]
        logprobs, entropy = (
            torch.cat([one for one, _ in found]),
            torch.cat([other for _, other in found]),
        )
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        hidden, whole_weight, whole_bias, targets = ctx.saved_tensors
        temperature, rows, entropy_gradient, logit_map = ctx.settings
        # Detached: a chunk's gradients come back here and reach no parameter by themselves.
        weight = whole_weight.detach().requires_grad_()
        bias = None if whole_bias is None else whole_bias.detach().requires_grad_()
        given = [weight] if bias is None else [weight, bias]
        sums = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in given]
        of_hidden = []
        for chunk in _chunks(len(targets), rows):
            part = hidden[chunk].detach().requires_grad_()
            with torch.enable_grad():
                results = _chunk(
                    part, weight, targets[chunk], temperature, bias, entropy_gradient, logit_map
                )
            used = 1 + entropy_gradient
            of_part, *of_head = torch.autograd.grad(
                results[:used], [part, *given], [gradient[chunk] for gradient in outer[:used]]
            )
            of_hidden.append(of_part)
            for total, gradient in zip(sums, of_head, strict=True):
                total += gradient
        of_weight, *of_bias = (
            total.to(tensor.dtype) for total, tensor in zip(sums, given, strict=True)
        )
        return (
            torch.cat(of_hidden),
            of_weight,
            of_bias[0] if of_bias else None,
            None,
            None,
            None,
            None,
            None,
        )


def _chunks(total: int, rows: int) -> list[slice]:
    return [slice(at, at + rows) for at in range(0, total, rows)]


@torch.no_grad()
def greedy_tokens(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
    logit_map: LogitMap = IDENTITY,
) -> Tensor:
    """The most probable next token [N] for each row of `hidden` [N, H]; the lowest id wins a
    tie."""
    rows = _chunk_rows(weight, chunk_elements)
    return torch.cat(
        [
            _logits(hidden[at : at + rows], weight, bias, logit_map).argmax(-1)
            for at in range(0, max(1, len(hidden)), rows)
        ]
    )


def _chunk_rows(weight: Tensor, chunk_elements: int) -> int:
    return max(1, chunk_elements // weight.shape[0])


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_map: LogitMap) -> Tensor:
    return logit_map(torch.nn.functional.linear(hidden, weight, bias).float())


def _chunk(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    bias: Tensor | None,
    entropy_gradient: bool,
    logit_map: LogitMap,
) -> tuple[Tensor, Tensor]:
    log_probs = torch.log_softmax(_logits(hidden, weight, bias, logit_map) / temperature, dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy
