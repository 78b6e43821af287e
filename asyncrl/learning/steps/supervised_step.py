"""One supervised step: packs the rows into examples by a packing strategy, and trains on their
target tokens."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch import Tensor

from asyncrl.algorithms.loss_metrics import LossSums
from asyncrl.algorithms.objective import supervised_loss, token_weights
from asyncrl.contracts.offline_rows import check_offline_table
from asyncrl.learning.engine.state import LearnerState
from asyncrl.learning.packing.blocks import SEQ_LENGTHS, pack_blocks
from asyncrl.learning.packing.strategies import Strategy
from asyncrl.learning.steps.blame import keep_if_bad, name_culprit
from asyncrl.learning.steps.passes import train
from asyncrl.models.micro_batches import Example, MicroBatch, plain_example

logger = logging.getLogger(__name__)


def supervised_step(
    state: LearnerState, table: pa.Table, scheduled: bool = False
) -> dict[str, float]:
    """Take one step of next-token prediction on the targets of these rows (a collective).

    The learner's packing strategy decides how rows are cut. The rows of a skipped step, or of one
    with a spike of the gradient norm, are kept. The log of this process has their path.

    Args:
        table: rows with SFT_SCHEMA.
        scheduled: use the schedule's learning rate. The warm start keeps the peak instead.

    Returns:
        Metrics. `pieces_left_out` counts pieces of rows without a token to predict.
        `tokens_left_out` counts target tokens that no piece predicts.

    Raises:
        ValueError: as in `supervised_examples`.
    """
    spec, moment = state.spec, f"supervised_{state.applied:06d}"
    examples, pieces_left_out, tokens_left_out = supervised_examples(
        table, spec.learner.max_tokens_per_row, spec.packing_strategy
    )
    weights = token_weights([example.loss_tokens for example in examples], "token_mean", 1)
    rate = state.scheduled(state.learning_rate) if scheduled else state.learning_rate
    metrics = train(state, examples, weights, _loss, rate, 0.0, temperature=1.0, parts=("ce/loss",))
    if metrics["applied"]:
        state.trained_tokens += int(metrics["tokens"])
        metrics["grad_norm_ratio"] = state.norms.ratio(metrics["grad_norm"])
    find_culprit = partial(name_culprit, state, examples, weights, _loss, 1.0)
    if note := keep_if_bad(state, metrics, moment, [table], find_culprit):
        logger.warning("supervised step %d: %s", state.applied, note)
    return metrics | {
        "pieces_left_out": float(pieces_left_out),
        "tokens_left_out": float(tokens_left_out),
    }


def _loss(
    logprobs: Tensor, entropy: Tensor, values: Tensor, batch: MicroBatch
) -> tuple[Tensor, LossSums]:
    return supervised_loss(logprobs, batch.weights)


def supervised_examples(
    table: pa.Table, max_tokens: int, strategy: Strategy
) -> tuple[list[Example], int, int]:
    """Cut the rows into pieces with `pack_blocks`. Returns their examples, the number of pieces
    left out, and the number of target tokens that no piece predicts.

    Each piece is an independent example: its first token is only context, even if it is a target in
    its row. A piece without a token to predict, such as a part of a prompt, is left out.

    Args:
        table: rows with SFT_SCHEMA.

    Raises:
        ValueError: the table is malformed, a row is longer than `max_tokens` under `bfd`, or no
            piece has a token to predict.
    """
    check_offline_table(table)
    pieces = [
        piece for packed in pack_blocks([table], max_tokens, strategy) for piece in _pieces(packed)
    ]
    examples = [piece for piece in pieces if piece.loss_tokens]
    if not examples:
        raise ValueError(
            f"none of the {len(pieces)} pieces of {table.num_rows} supervised rows has a token to"
            f" predict; raise learner.max_tokens_per_gpu: rows of {max_tokens} tokens are too short"
        )
    targets = pc.sum(pc.list_flatten(table["loss_mask"])).as_py()
    return (
        examples,
        len(pieces) - len(examples),
        int(targets) - sum(example.loss_tokens for example in examples),
    )


def _pieces(packed: pa.Table) -> list[Example]:
    """Each segment of the packed rows as an example: one token of context, and the following
    tokens."""
    ids, targets = (
        packed[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        for name in ("input_ids", "loss_mask")
    )
    ends = np.cumsum(packed[SEQ_LENGTHS].combine_chunks().flatten().to_numpy())[:-1]
    return [
        plain_example(tokens.astype(np.int64), 1, mask[1:])
        for tokens, mask in zip(np.split(ids, ends), np.split(targets, ends), strict=True)
    ]
