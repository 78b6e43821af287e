"""Pairs of a step that are too long for one micro-batch, and are computed in two passes.

A forward pass without gradient gives one value for each side, such as its summed log-prob or its
score. With them, the derivative of the loss for each value is known. Each side is then trained
alone, with its value times that derivative. The gradient is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.learning.engine.state import LearnerState
from asyncrl.learning.examples.offline_examples import Pair
from asyncrl.learning.packing.prefixes import row_tokens
from asyncrl.learning.steps.passes import forward_batches
from asyncrl.models.micro_batches import Example, MicroBatch


def split_pairs(state: LearnerState, pairs: Sequence[Pair]) -> tuple[list[Example], list[Pair]]:
    """The sides of the pairs that fit into a micro-batch, each pair one packing unit, and the pairs
    that do not fit. None fits under `learner.packing: none`."""
    limit = 0 if state.packing == "none" else state.spec.learner.max_tokens_per_row
    short, long = list[Pair](), list[Pair]()
    for pair in pairs:
        fits = row_tokens([side.tokens for side in pair]) <= limit
        (short if fits else long).append(pair)
    return [replace(side, unit=unit) for unit, pair in enumerate(short) for side in pair], long


def values_of(
    state: LearnerState,
    examples: Sequence[Example],
    temperature: float,
    of_batch: Callable[[Tensor, Tensor, MicroBatch], Tensor],
) -> Tensor:
    """One value of each example, [number of examples] float64 on the CPU, without gradient (a
    collective). The same on every rank.

    Args:
        of_batch: (log-probs, values of the head, micro-batch) → the values [B] of its
            trajectories.
    """
    found = torch.zeros(len(examples), dtype=torch.float64, device=state.device)
    for batch, (logprobs, _, values) in forward_batches(state, examples, temperature):
        if batch.order and state.sequence_rank == 0:  # ranks that share a row have the same values
            found[list(batch.order)] = of_batch(logprobs, values, batch).double()
    dist.all_reduce(found)
    return found.cpu()


def sides_alone(
    pairs: Sequence[Pair], loss: Tensor, values: tuple[Tensor, Tensor]
) -> list[Example]:
    """The sides of long pairs, each with the derivative of the loss for its value.

    Args:
        loss: of all pairs, with the graph from both values [number of pairs].
    """
    slopes = torch.autograd.grad(loss, values)
    return [
        replace(side, slope=float(slope[number]))
        for number, pair in enumerate(pairs)
        for side, slope in zip(pair, slopes, strict=True)
    ]


def gradient_alone(values: Tensor, batch: MicroBatch) -> Tensor:
    """A loss of 0 whose gradient is that of the long pairs' sides of a micro-batch. `values` [N]
    sum up to the sides' values."""
    if batch.slopes is None:
        return 0.0 * values.sum(dtype=torch.float64)
    return (batch.slopes * (values - values.detach())).sum()
