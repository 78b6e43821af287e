"""The rows of a fixed dataset as token tables: what SFT, DPO and KTO train on.

`data.offline` makes the rows before training, and the learner reads slices of the table. A mask has
one value per token, so a chat has its own mask in each turn. A masked token is a target: the model
learns to predict it from the tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Scored = Sequence[Sequence[bool]]
"""For each of some token rows, which of its second ids get a log-prob."""
TokenRow = tuple[Sequence[int], Sequence[int]]
"""Prompt ids, and the ids that follow them."""

IDS = pa.list_(pa.int32())
MASK = pa.list_(pa.bool_())
REFERENCE = pa.list_(pa.float32())
"""Log-probs in nats, one for each True of the row's mask, in order."""

SFT_SCHEMA = pa.schema([("input_ids", IDS), ("loss_mask", MASK)])
"""One sequence. The mask's first value is False, because nothing predicts the first token."""

SIDES: Final = ("chosen", "rejected")
"""The sides of a pair. Columns of a side are `<side>_ids`, `<side>_mask` and `<side>_reference`."""

PREFERENCE_SCHEMA = pa.schema(
    [
        ("chosen_ids", IDS),
        ("chosen_mask", MASK),
        ("rejected_ids", IDS),
        ("rejected_mask", MASK),
    ]
)
"""A pair: the same prompt with two completions."""

UNPAIRED_SCHEMA = pa.schema([("input_ids", IDS), ("loss_mask", MASK), ("label", pa.bool_())])
"""A prompt with one completion. The label says whether the completion is desirable (KTO)."""

REFERENCE_COLUMNS: Final = ("chosen_reference", "rejected_reference")
"""Columns that the reference policy adds to pairs, with the type REFERENCE."""

UNPAIRED_REFERENCE_COLUMN: Final = "reference"
"""Column that the reference policy adds to unpaired rows, with the type REFERENCE."""

BEHAVIOR_COLUMNS: Final = ("chosen_behavior", "rejected_behavior")
"""Columns with the log-probs by the policy that sampled a pair's tokens, with the type
REFERENCE."""

OLDEST_VERSION_COLUMN: Final = "oldest_version"
"""Column with the oldest policy version among the tokens of a pair's completions, int32."""

MISMATCHED_COLUMNS: Final = ("mismatched_ids", "mismatched_mask", "mismatched_reference")
"""Columns of unpaired rows for KTO's baseline: each prompt with the completion of another row, and
the reference policy's log-probs of that completion."""

MISMATCHED_WITHIN: Final = 16
"""Rows before an unpaired row among which `mismatched_rows` looks for another prompt."""

LISTS: Final = (("input_ids", "loss_mask"), *((f"{side}_ids", f"{side}_mask") for side in SIDES))
"""(Token ids, mask) of each sequence that a row may have."""


def list_arrays(column: pa.ChunkedArray) -> list[np.ndarray]:
    """The lists of a column, one array for each row. A null is an empty list."""
    if not len(column):
        return []
    ends = np.cumsum(pc.list_value_length(column).fill_null(0).to_numpy())
    # `list_flatten` respects slices. `values` would return the whole buffer behind them.
    return np.split(pc.list_flatten(column).to_numpy(), ends[:-1])


def token_table(rows: Sequence[TokenRow]) -> pa.Table:
    """The SFT rows (SFT_SCHEMA) of (prompt ids, target ids): every target token is a target.

    Raises:
        ValueError: a row has no prompt or no target.
    """
    lengths = np.array(
        [[len(prompt), len(following)] for prompt, following in rows], dtype=np.int64
    ).reshape(-1, 2)
    if (empty := np.flatnonzero((lengths == 0).any(axis=1))).size:
        prompt, following = lengths[empty[0]]
        raise ValueError(
            f"a row of {prompt} prompt and {following} following tokens has nothing to predict;"
            " give at least one of each"
        )
    ids = np.fromiter(
        chain.from_iterable(chain.from_iterable(rows)), dtype=np.int32, count=int(lengths.sum())
    )
    targets = np.repeat(np.tile([False, True], len(rows)), lengths.ravel())
    return _sft_table(lengths.sum(axis=1), ids, targets)


def mismatched_rows(table: pa.Table) -> pa.Table:
    """The SFT rows of unpaired rows in which each prompt has the completion of another prompt: of
    the nearest row before, up to MISMATCHED_WITHIN rows away, and of the row before if all of these
    have its own prompt. The last row is before the first. A completion begins at the first target.

    TRL takes the row before. Its rows of a pair are far apart, and ours follow one another.

    Raises:
        ValueError: a row has no target.
    """
    targets = _targets(table["loss_mask"])
    if (empty := np.flatnonzero(targets == 0)).size:
        raise ValueError(f"row {empty[0]} has no target; leave it out")
    ids, masks = (list_arrays(table[name]) for name in ("input_ids", "loss_mask"))
    prompts = [int(mask.argmax()) for mask in masks]
    starts = [tokens[:prompt].tobytes() for tokens, prompt in zip(ids, prompts, strict=True)]
    parts = [
        (ids[row][:prompt], ids[other][prompts[other] :], masks[other][prompts[other] :])
        for row, prompt in enumerate(prompts)
        for other in [_other_prompt(starts, row)]
    ]
    return _sft_table(
        np.array([len(prompt) + len(following) for prompt, following, _ in parts], dtype=np.int64),
        np.concatenate([part for prompt, following, _ in parts for part in (prompt, following)]),
        np.concatenate([part for prompt, _, mask in parts for part in (prompt < 0, mask)]),
    )


def _other_prompt(prompts: Sequence[bytes], row: int) -> int:
    """The nearest row before this one, cyclically, with another prompt."""
    before = [(row - steps) % len(prompts) for steps in range(1, MISMATCHED_WITHIN + 1)]
    return next((other for other in before if prompts[other] != prompts[row]), before[0])


def _sft_table(lengths: np.ndarray, ids: np.ndarray, targets: np.ndarray) -> pa.Table:
    """The rows of these lengths [R], whose tokens are concatenated."""
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    return pa.table(
        [
            pa.ListArray.from_arrays(offsets, pa.array(ids, pa.int32())),
            pa.ListArray.from_arrays(offsets, pa.array(targets, pa.bool_())),
        ],
        schema=SFT_SCHEMA,
    )


def check_offline_table(table: pa.Table) -> None:
    """Check what every reader of a token table relies on.

    Raises:
        ValueError: columns are missing or have other types, a list is null, a mask has another
            length than its token ids or marks the first token, or a reference has another length
            than its mask has targets.
    """
    schema = next(
        (
            known
            for known in (PREFERENCE_SCHEMA, UNPAIRED_SCHEMA, SFT_SCHEMA)
            if set(known.names) <= set(table.column_names)
        ),
        None,
    )
    if schema is None:
        raise ValueError(
            f"the table has the columns {table.column_names}, which are no token rows; it needs"
            f" {SFT_SCHEMA.names} or {PREFERENCE_SCHEMA.names}"
        )
    for field in schema:
        if table.schema.field(field.name).type != field.type or table[field.name].null_count:
            raise ValueError(
                f"column {field.name!r} has type {table.schema.field(field.name).type} or nulls;"
                f" it must be {field.type} without nulls"
            )
    for ids, mask in LISTS:
        if ids in schema.names:
            _check_mask(table, ids, mask)
    names = dict(zip(REFERENCE_COLUMNS, (mask for _, mask in LISTS[1:]), strict=True))
    for name, mask in {**names, UNPAIRED_REFERENCE_COLUMN: "loss_mask"}.items():
        if name in table.column_names and mask in schema.names:
            _check_reference(table, name, mask)


def _check_mask(table: pa.Table, ids: str, mask: str) -> None:
    lengths, masks = (pc.list_value_length(table[name]).to_numpy() for name in (ids, mask))
    if (lengths != masks).any():
        row = int((lengths != masks).argmax())
        raise ValueError(
            f"row {row}: {mask!r} has {masks[row]} values for {lengths[row]} tokens; give one each"
        )
    firsts = pc.list_element(table[mask].filter(pa.array(masks > 0)), 0)
    if pc.any(firsts).as_py():
        raise ValueError(f"{mask!r} marks a first token, which nothing predicts; unmark it")


def _check_reference(table: pa.Table, name: str, mask: str) -> None:
    targets = _targets(table[mask])
    lengths = pc.list_value_length(table[name]).fill_null(-1).to_numpy()
    if (lengths != targets).any():
        row = int((lengths != targets).argmax())
        raise ValueError(
            f"row {row}: {name!r} has {lengths[row]} values for {targets[row]} targets; give one"
            " for each True of the mask"
        )


def _targets(masks: pa.ChunkedArray) -> np.ndarray:
    """[R] int64: number of True values in each mask."""
    lengths = pc.list_value_length(masks).to_numpy()
    values = pc.list_flatten(masks).to_numpy()
    ends = np.cumsum(lengths)
    counted = np.concatenate([[0], np.cumsum(values)])
    targets: np.ndarray = counted[ends] - counted[ends - lengths]
    return targets
