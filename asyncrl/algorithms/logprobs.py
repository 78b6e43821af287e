"""Token log-probs from hidden states and the head's weight, computed in chunks. The full logits
[N, vocabulary] are never in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from asyncrl.algorithms.logit_chunks import CHUNK_ELEMENTS, LIVE_CHUNKS

AUTOGRAD_LIVE = 7
"""Peak memory of a chunk whose backward pass is autograd's, in the same tensors as LIVE_CHUNKS."""


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """How a policy computes log-probs from its last hidden states."""

    chunk_elements: int = CHUNK_ELEMENTS
    fp32: bool = False
    """Compute the logits in float32, whatever the model's dtype."""


PLAIN_HEAD = HeadSettings()


@dataclass(frozen=True, slots=True)
class LogitMap:
    """A model's change to its logits after the head: z → softcap * tanh(scale * z / softcap)."""

    scale: float = 1.0
    softcap: float | None = None
    """Bound of the logits. None: no bound, so z → scale * z."""

    def __call__(self, logits: Tensor) -> Tensor:
        """Return the changed logits, with the same shape."""
        scaled = logits if self.scale == 1.0 else logits * self.scale
        return scaled if self.softcap is None else torch.tanh(scaled / self.softcap) * self.softcap

    def derivative(self, logits: Tensor) -> Tensor | float:
        """The derivative of the changed logits by the logits: their shape, or one number."""
        if self.softcap is None:
            return self.scale
        tanh = (logits * (self.scale / self.softcap)).tanh_()
        return tanh.square_().neg_().add_(1.0).mul_(self.scale)


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
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of `targets` and the entropies [N], in float32 nats, of
    softmax(logit_map(hidden @ weight.T + bias) / temperature). `targets` is [N], or [N, M] for M
    tokens of each row, and the log-probs have its shape.

    Without `with_entropy`, which needs `torch.no_grad()`, the entropies are empty.

    `hidden` is [N, H], `weight` [V, H], `bias` [V]. The entropies have a gradient only with
    `entropy_gradient`. Unless all logits are much less than a chunk, the backward pass computes
    them again. It sums the gradients of weight and bias over the chunks in float32, whatever their
    dtype.

    Raises:
        ValueError: the temperature is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature = {temperature} gives no log-probs; use one above 0")
    rows = _chunk_rows(weight, chunk_elements)
    if not torch.is_grad_enabled() and len(targets) > rows:
        return _of_chunks(hidden, weight, targets, temperature, bias, rows, logit_map, with_entropy)
    if not torch.is_grad_enabled() or len(targets) * AUTOGRAD_LIVE <= rows * LIVE_CHUNKS:
        return _chunk(
            hidden, weight, targets, temperature, bias, entropy_gradient, logit_map, with_entropy
        )
    logprobs, entropy = _Chunked.apply(
        hidden, weight, bias, targets, temperature, rows, entropy_gradient, logit_map
    )  # type: ignore[no-untyped-call]
    return logprobs, entropy


class _ChunkedContext(FunctionCtx):
    """What `_Chunked.forward` keeps for its backward pass."""

    saved_tensors: tuple[Tensor, ...]
    """Hidden states, targets, entropies, and the head: its weight, and its bias if it has one."""
    settings: tuple[float, int, bool, LogitMap]
    """Temperature, rows of a chunk, entropy_gradient and logit_map."""


class _Chunked(torch.autograd.Function):
    """Applies `_chunk` to `rows` rows at a time, and keeps only the results of each chunk. Its
    backward pass applies `_chunk_gradients`.

    Autograd alone would sum the head's gradient in the weight's dtype. In bfloat16, the sum of 600
    similar chunks then loses a sixth or more: a term much smaller than the sum is rounded away.
    """

    @staticmethod
    def forward(
        ctx: _ChunkedContext,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        rows: int,
        entropy_gradient: bool,
        logit_map: LogitMap,
    ) -> tuple[Tensor, Tensor]:
        head = [weight] if bias is None else [weight, bias]
        ctx.settings = temperature, rows, entropy_gradient, logit_map
        logprobs, entropy = _of_chunks(hidden, weight, targets, temperature, bias, rows, logit_map)
        ctx.save_for_backward(hidden, targets, entropy, *head)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: _ChunkedContext, *outer: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, entropy, *head = ctx.saved_tensors
        temperature, rows, entropy_gradient, logit_map = ctx.settings
        weight, *rest = head
        of_hidden = []
        sums = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in head]
        for chunk in _chunks(len(targets), rows):
            of_part, *of_head = _chunk_gradients(
                hidden[chunk],
                weight,
                targets[chunk],
                temperature,
                rest[0] if rest else None,
                logit_map,
                outer[0][chunk],
                (entropy[chunk], outer[1][chunk]) if entropy_gradient else None,
            )
            of_hidden.append(of_part)
            for total, gradient in zip(sums, of_head, strict=True):
                total += gradient
        of_weight, *of_bias = (
            total.to(tensor.dtype) for total, tensor in zip(sums, head, strict=True)
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


def _of_chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    bias: Tensor | None,
    rows: int,
    logit_map: LogitMap,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Apply `_chunk` to `rows` rows at a time, without gradient."""
    found = [
        _chunk(
            hidden[chunk], weight, targets[chunk], temperature, bias, False, logit_map, with_entropy
        )
        for chunk in _chunks(len(targets), rows)
    ]
    return (
        torch.cat([logprobs for logprobs, _ in found]),
        torch.cat([entropy for _, entropy in found]),
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
    """Return the most probable next token [N] for each row of `hidden` [N, H]. In a tie, the lowest
    id wins."""
    rows = _chunk_rows(weight, chunk_elements)
    return torch.cat(
        [
            _logits(hidden[at : at + rows], weight, bias, logit_map).argmax(-1)
            for at in range(0, max(1, len(hidden)), rows)
        ]
    )


@torch.no_grad()
def top_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    top_k: int,
    vocabulary: int | None = None,
    bias: Tensor | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
    logit_map: LogitMap = IDENTITY,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probs [N] of `targets` [N], then the ids [N, K] and log-probs [N, K] of the
    most probable other tokens of each row, most probable first.

    K is `top_k`, or the number of other tokens if there are fewer. With `vocabulary`, only ids
    below it are among them. The probabilities are still those over the whole vocabulary.
    """
    known = min(vocabulary or weight.shape[0], weight.shape[0])
    count = min(top_k, known - 1)
    found = []
    for chunk in _chunks(max(1, len(targets)), _chunk_rows(weight, chunk_elements)):
        logits = _logits(hidden[chunk], weight, bias, logit_map)
        log_probs = torch.log_softmax(logits if temperature == 1.0 else logits / temperature, -1)
        indices = targets[chunk, None]
        own = log_probs.gather(-1, indices).squeeze(-1)
        others = log_probs.scatter_(-1, indices, float("-inf"))[:, :known].topk(count, -1)
        found.append((own, others.indices, others.values))
    own, ids, values = (torch.cat(parts) for parts in zip(*found, strict=True))
    return own, ids, values


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
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the log-probs of the targets, in their shape, and the entropies [N] of one chunk.
    `with_entropy` is false where the entropies are not used; they are then empty."""
    log_probs = torch.log_softmax(
        _tempered(torch.nn.functional.linear(hidden, weight, bias), temperature, logit_map),
        dim=-1,
        dtype=torch.float32,
    )
    if not with_entropy:
        entropy = log_probs.new_zeros(0)
    elif entropy_gradient and torch.is_grad_enabled():
        entropy = -(log_probs.exp() * log_probs).sum(-1)
    else:
        with torch.no_grad():
            entropy = -log_probs.exp().mul_(log_probs).sum(-1)
    if targets.dim() == 2:
        return log_probs.gather(-1, targets), entropy
    return log_probs.gather(-1, targets[:, None]).squeeze(-1), entropy


def _tempered(outputs: Tensor, temperature: float, logit_map: LogitMap) -> Tensor:
    """The head's outputs, mapped and divided by the temperature in float32. Where nothing changes
    they keep their dtype, because a softmax converts them at no cost."""
    if temperature == 1.0 and logit_map == IDENTITY:
        # A division by 1 changes nothing, but on a CPU it costs as much as a softmax.
        return outputs
    return logit_map(outputs.float()) / temperature


def _chunk_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    bias: Tensor | None,
    logit_map: LogitMap,
    of_logprobs: Tensor,
    entropies: tuple[Tensor, Tensor] | None,
) -> list[Tensor]:
    """Return the gradients of hidden states, weight and bias (if there is one) of one chunk.

    Args:
        of_logprobs: the gradients of the log-probs, in the shape of `targets`.
        entropies: the entropies [N] and their gradients [N]; None = they have no gradient.

    With z the tempered logits, p their softmax and H the entropy: d log p(t) / dz = 1(t) - p, and
    dH / dz = -p (log p + H). autograd would keep three times as many tensors of a chunk's size.
    """
    outputs = torch.nn.functional.linear(hidden, weight, bias)
    indices = targets[:, None] if targets.dim() == 1 else targets
    of_targets = (of_logprobs.view(indices.shape) / temperature).float()
    of_sum = -of_targets.sum(-1, keepdim=True)
    tempered = _tempered(outputs, temperature, logit_map)
    if logit_map == IDENTITY:
        del outputs
    if entropies is None:
        gradient = torch.softmax(tempered, dim=-1, dtype=torch.float32).mul_(of_sum)
        del tempered
    else:
        log_probs = torch.log_softmax(tempered, dim=-1, dtype=torch.float32)
        del tempered
        gradient = log_probs.exp()
        entropy, of_entropy = (tensor[:, None] for tensor in entropies)
        slopes = -of_entropy / temperature
        gradient.mul_(log_probs.add_(entropy).mul_(slopes).add_(of_sum))
        del log_probs
    gradient.scatter_add_(-1, indices, of_targets)
    if logit_map != IDENTITY:
        gradient.mul_(logit_map.derivative(outputs.float()))
        del outputs
    of_outputs = gradient.to(hidden.dtype)
    found = [of_outputs @ weight, of_outputs.mT @ hidden]
    return found if bias is None else [*found, gradient.sum(0)]
