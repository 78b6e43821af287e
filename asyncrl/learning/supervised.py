"""From supervised rows to examples: whole, or in the pieces that a packing strategy cuts them into."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import pyarrow as pa

from asyncrl.data.blocks import SEQ_LENGTHS, pack_blocks
from asyncrl.data.packing import Strategy
from asyncrl.learning.batches import Example, TokenRow, plain_example

__all__ = ["supervised_examples"]


def supervised_examples(
    rows: Sequence[TokenRow], max_tokens: int, strategy: Strategy
) -> tuple[list[Example], int, int]:
    """Examples of the rows as `pack_blocks` cuts them, the number of pieces left out, and the number of target tokens that no piece predicts.

    A piece is on its own: its first token is context only, whatever it was in its row. A piece without any token to predict, such as one of a prompt,
    is left out.

    Raises:
        ValueError: a row has nothing to predict, or is longer than `max_tokens` under `bfd`, or no piece at all has a token to predict.
    """
    pieces = [
        piece
        for packed in pack_blocks([_token_table(rows)], max_tokens, strategy)
        for piece in _pieces(packed)
    ]
    examples = [piece for piece in pieces if piece.loss_tokens]
    if not examples:
        raise ValueError(
            f"none of the {len(pieces)} pieces of {len(rows)} supervised rows has a token to predict; raise learner.max_tokens_per_gpu: rows of {max_tokens} "
            "tokens are too short"
        )
    targets = sum(len(following) for _, following in rows)
    return (
        examples,
        len(pieces) - len(examples),
        targets - sum(example.loss_tokens for example in examples),
    )


def _token_table(rows: Sequence[TokenRow]) -> pa.Table:
    """The rows as a block: ids, and whether each is a target."""
    lengths = np.array(
        [[len(prompt), len(following)] for prompt, following in rows], dtype=np.int64
    ).reshape(-1, 2)
    if (empty := np.flatnonzero((lengths == 0).any(axis=1))).size:
        prompt, following = lengths[empty[0]]
        raise ValueError(
            f"a row of {prompt} prompt and {following} following tokens has nothing to predict; give at least one of each"
        )
    ids = np.fromiter(
        chain.from_iterable(chain.from_iterable(rows)), dtype=np.int64, count=int(lengths.sum())
    )
    targets = np.repeat(np.tile([False, True], len(rows)), lengths.ravel())
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths.sum(axis=1))]), pa.int32())
    return pa.table(
        {
            name: pa.ListArray.from_arrays(offsets, pa.array(values))
            for name, values in (("input_ids", ids), ("loss_mask", targets))
        }
    )


def _pieces(packed: pa.Table) -> list[Example]:
    """Each segment of packed rows: a token of context, and what follows it."""
    ids, targets = (
        packed[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        for name in ("input_ids", "loss_mask")
    )
    ends = np.cumsum(packed[SEQ_LENGTHS].combine_chunks().flatten().to_numpy())[:-1]
    return [
        plain_example(tokens, 1, mask[1:])
        for tokens, mask in zip(np.split(ids, ends), np.split(targets, ends), strict=True)
    ]
