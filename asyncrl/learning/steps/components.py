"""The components of a step's loss. Each has its own tokens and its own denominator over the whole
step, all ranks and micro-batches. The loss is the sum of the components, with weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from asyncrl.algorithms.loss_metrics import LossSums
from asyncrl.algorithms.objective import supervised_loss
from asyncrl.learning.steps.passes import Loss
from asyncrl.models.micro_batches import Example, MicroBatch

CE = "ce"
"""Next-token prediction."""


@dataclass(frozen=True, slots=True)
class Component:
    """One component of a loss."""

    weight: float
    loss: Loss
    """Computes the component of one micro-batch, already divided by the step's denominator."""


def weighted_sum(components: Sequence[Component]) -> Loss:
    """The loss of a step with these components, of which there is at least one. The metrics of
    each component are those without its weight."""

    def loss(
        logprobs: Tensor, entropy: Tensor, values: Tensor, batch: MicroBatch
    ) -> tuple[Tensor, LossSums]:
        found = [component.loss(logprobs, entropy, values, batch) for component in components]
        total, sums = found[0][0] * components[0].weight, found[0][1]
        parts = dict(sums.parts)
        for component, (part, part_sums) in zip(components[1:], found[1:], strict=True):
            total = total + component.weight * part
            parts |= part_sums.parts
        return total, replace(sums, loss=total.detach(), parts=parts)

    return loss


def with_token_mean(
    examples: Sequence[Example], name: str, includes: Callable[[Example], bool]
) -> list[Example]:
    """The examples of a whole step with one more component: a mean over the loss tokens of the
    examples that it includes."""
    tokens = sum(example.loss_tokens for example in examples if includes(example))
    return [
        replace(
            example,
            components={
                **example.components,
                name: example.loss_mask.astype(np.float32) / np.float32(max(tokens, 1)),
            },
        )
        if includes(example)
        else example
        for example in examples
    ]


def ce_loss(
    logprobs: Tensor, entropy: Tensor, values: Tensor, batch: MicroBatch
) -> tuple[Tensor, LossSums]:
    """The component `ce` of a micro-batch: its mean negative log-likelihood, in nats."""
    weights = batch.components.get(CE)
    return supervised_loss(logprobs, logprobs.new_zeros(()) if weights is None else weights)
