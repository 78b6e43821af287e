"""Converts tables of fixed rows to examples: rows of next-token prediction, pairs of completions,
and single completions with a label. `contracts.offline_rows` describes the tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from asyncrl.contracts.offline_rows import (
    BEHAVIOR_COLUMNS,
    MISMATCHED_COLUMNS,
    OLDEST_VERSION_COLUMN,
    REFERENCE_COLUMNS,
    SIDES,
    UNPAIRED_REFERENCE_COLUMN,
    check_offline_table,
    list_arrays,
)
from asyncrl.models.micro_batches import Example, plain_example

Pair = tuple[Example, Example]
"""The chosen and the rejected side."""


@dataclass(frozen=True, slots=True)
class UnpairedRows:
    """Single completions with a label, and the same prompts with other completions."""

    completions: list[Example]
    mismatched: list[Example]


def pairs_of(table: pa.Table, reference: bool, behavior: bool) -> list[Pair]:
    """The pairs of a table with PREFERENCE_SCHEMA. Tokens get the pair's version if the table has
    OLDEST_VERSION_COLUMN, else version 0.

    Args:
        reference: whether to read the reference policy's log-probs.
        behavior: whether to read the log-probs of the policy that sampled the tokens.

    Raises:
        ValueError: a column is missing, lists of a row do not fit together, or a side has no
            target.
    """
    check_offline_table(table)
    sides = []
    for number, side in enumerate(SIDES):
        found = examples_with(
            table,
            f"{side}_ids",
            f"{side}_mask",
            REFERENCE_COLUMNS[number] if reference else None,
            BEHAVIOR_COLUMNS[number] if behavior else None,
        )
        _refuse_empty(found, f"{side}_mask")
        sides.append([replace(example, chosen=side == "chosen") for example in found])
    pairs: list[Pair] = list(zip(*sides, strict=True))
    if OLDEST_VERSION_COLUMN not in table.column_names:
        return pairs
    versions = table[OLDEST_VERSION_COLUMN].to_pylist()
    return [
        (_of_version(chosen, version), _of_version(rejected, version))
        for (chosen, rejected), version in zip(pairs, versions, strict=True)
    ]


def _of_version(example: Example, version: int) -> Example:
    """The example with this version for all of its tokens."""
    return replace(example, versions=np.full(len(example.loss_mask), version, dtype=np.int32))


def unpaired_of(table: pa.Table) -> UnpairedRows:
    """The rows of a table with UNPAIRED_SCHEMA, the reference policy's log-probs, and
    MISMATCHED_COLUMNS.

    Raises:
        ValueError: as in `pairs_of`.
    """
    check_offline_table(table)
    ids, mask, reference = MISMATCHED_COLUMNS
    completions = examples_with(table, "input_ids", "loss_mask", UNPAIRED_REFERENCE_COLUMN)
    mismatched = examples_with(table, ids, mask, reference)
    _refuse_empty(completions, "loss_mask")
    _refuse_empty(mismatched, mask)
    labels = _column(table, "label").to_pylist()
    return UnpairedRows(
        [replace(row, chosen=label) for row, label in zip(completions, labels, strict=True)],
        mismatched,
    )


def examples_with(
    table: pa.Table,
    ids: str,
    mask: str,
    reference: str | None = None,
    behavior: str | None = None,
) -> list[Example]:
    """One example for each row, with a context of one token.

    Args:
        ids, mask: columns with the token ids and the mask of their targets.
        reference, behavior: columns with one log-prob for each target, if they are to be read.

    Raises:
        ValueError: a column is missing, or a row has another number of log-probs than of targets.
    """
    examples = [
        plain_example(tokens.astype(np.int64), 1, flags[1:])
        for tokens, flags in zip(
            list_arrays(_column(table, ids)), list_arrays(_column(table, mask)), strict=True
        )
    ]
    if reference is not None:
        found = _at_targets(table, reference, examples)
        examples = [
            replace(example, reference_logprobs=values)
            for example, values in zip(examples, found, strict=True)
        ]
    if behavior is not None:
        found = _at_targets(table, behavior, examples)
        examples = [
            replace(example, behavior_logprobs=values)
            for example, values in zip(examples, found, strict=True)
        ]
    return examples


def _at_targets(table: pa.Table, name: str, examples: Sequence[Example]) -> list[np.ndarray]:
    """The log-probs [C] float32 of each example's tokens: the column's values at its targets, and 0
    elsewhere."""
    arrays = []
    lists = list_arrays(_column(table, name))
    for row, (example, values) in enumerate(zip(examples, lists, strict=True)):
        if len(values) != example.loss_tokens:
            raise ValueError(
                f"row {row}: {name!r} has {len(values)} values for {example.loss_tokens} targets;"
                " give one for each True of the mask"
            )
        found = np.zeros(len(example.loss_mask), dtype=np.float32)
        found[example.loss_mask] = values
        arrays.append(found)
    return arrays


def _column(table: pa.Table, name: str) -> pa.ChunkedArray:
    if name not in table.column_names:
        raise ValueError(
            f"column {name!r} is missing; the rows have {table.column_names}: make them with it"
        )
    return table[name]


def _refuse_empty(examples: Sequence[Example], mask: str) -> None:
    """Raise ValueError for an example without a target."""
    for row, example in enumerate(examples):
        if not example.loss_tokens:
            raise ValueError(f"row {row}: {mask!r} marks no token; leave the row out")
