"""Evaluates held-out rows of next-token prediction, without gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from asyncrl.contracts.messages import HeldOutLoss
from asyncrl.contracts.offline_rows import check_offline_table
from asyncrl.learning.engine.state import LearnerState
from asyncrl.learning.examples.offline_examples import examples_with
from asyncrl.learning.steps.passes import forward_batches
from asyncrl.models.micro_batches import Example, plain_example


def held_out_loss(state: LearnerState, table: pa.Table) -> HeldOutLoss:
    """The loss on rows with SFT_SCHEMA, and how many rows the model predicts exactly (a
    collective). It takes two forward passes.

    A row longer than a micro-batch is cut into pieces that do not see each other. Nothing predicts
    the first token of a piece.

    Raises:
        ValueError: the table is malformed, or no row has a token to predict.
    """
    check_offline_table(table)
    pieces = [
        (row, piece)
        for row, example in enumerate(examples_with(table, "input_ids", "loss_mask"))
        for piece in _pieces(example, state.spec.learner.max_tokens_per_row)
    ]
    owner = np.array([row for row, _ in pieces], dtype=np.int64)
    found = _of_targets(state, [piece for _, piece in pieces], greedy=False)
    matches = _of_targets(state, [piece for _, piece in pieces], greedy=True)
    # Sums over the ranks: negative log-likelihood, targets, and matches by row.
    sums = np.zeros(2 + table.num_rows)
    for values in found.values():
        sums[:2] += -values.sum(dtype=np.float64), len(values)
    for index, flags in matches.items():
        sums[2 + owner[index]] += flags.sum()
    nll, tokens, *matched = _over_ranks(state, sums)
    if not tokens:
        raise ValueError("the held-out rows have no token to predict; give rows with targets")
    targets = np.bincount(
        owner, [piece.loss_tokens for _, piece in pieces], minlength=table.num_rows
    )
    with_targets = targets > 0
    exact = (np.array(matched) == targets)[with_targets].mean()
    return HeldOutLoss(nll, int(tokens), float(exact))


def target_logprobs(state: LearnerState, table: pa.Table) -> dict[int, np.ndarray]:
    """Log-probs in nats of the targets of rows with SFT_SCHEMA, at temperature 1, one for each True
    of a row's mask, float32 (a collective). Returns the rows that this rank processes: row index →
    log-probs. Rows without a target are left out.

    Raises:
        ValueError: the table is malformed, or a row is longer than a micro-batch.
    """
    check_offline_table(table)
    return _of_targets(state, examples_with(table, "input_ids", "loss_mask"), greedy=False)


def _of_targets(
    state: LearnerState, examples: Sequence[Example], greedy: bool
) -> dict[int, np.ndarray]:
    """The log-probs of the targets of each example that this rank processes, or with `greedy`
    whether each is the argmax."""
    kept = [index for index, example in enumerate(examples) if example.loss_tokens]
    found: dict[int, np.ndarray] = {}
    chosen = [examples[index] for index in kept]
    for batch, (values, *_) in forward_batches(state, chosen, 1.0, greedy):
        parts = values.cpu().split(list(batch.counts)) if batch.counts else ()
        found |= {kept[index]: part.numpy() for index, part in zip(batch.order, parts, strict=True)}
    return found


def _pieces(example: Example, max_tokens: int) -> list[Example]:
    """The example in pieces of at most `max_tokens` tokens."""
    if len(example.tokens) <= max_tokens:
        return [example]
    starts = range(0, len(example.tokens), max_tokens)
    # The mask begins with the second token of the example.
    return [
        plain_example(
            example.tokens[start : start + max_tokens],
            1,
            example.loss_mask[start : start + max_tokens - 1],
        )
        for start in starts
    ]


def _over_ranks(state: LearnerState, values: np.ndarray) -> list[float]:
    """The sums of these values over all ranks (a collective). Ranks that share rows have the same
    values, and count once."""
    sums = torch.from_numpy(values if state.sequence_rank == 0 else np.zeros_like(values))
    sums = sums.to(state.device)
    dist.all_reduce(sums)
    return [float(value) for value in sums.tolist()]
