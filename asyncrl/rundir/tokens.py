"""The tokens of one trajectory, with what generator and learner computed at each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from asyncrl.contracts.rows import TRAINED_COLUMNS

Rows = dict[tuple[int, int, int], list[dict[str, Any]]]
"""(attempt, ordinal, index) of a trajectory → its rows of `trained/*.parquet`."""
RowKey = tuple[int, int, int, int, int, int]
"""(attempt that trained it, version, attempt that made it, ordinal, index, first position)."""
OF_TOKENS = ("logprobs", "weights", "advantages", "clipped", "masked")
"""Columns of `trained/*.parquet` with one item per loss token."""
TOKEN_COLUMNS: dict[str, pa.DataType] = {
    "token": pa.int32(),
    "id": pa.int32(),
    "version": pa.int32(),
    "trained": pa.bool_(),
    "generator_logprob": pa.float32(),
    "learner_logprob": pa.float32(),
    "ratio": pa.float64(),
    "weight": pa.float32(),
    "advantage": pa.float32(),
    "clipped": pa.bool_(),
    "masked": pa.bool_(),
}
"""One row per sampled token. `ratio` is π_learner / π_generator when the token was trained. What
the learner computed is null for a token that was not trained or not recorded."""


def trained_fault(table: pa.Table) -> str:
    """What is wrong with the table of a file of `trained/`; "" if nothing is."""
    for name, kind in TRAINED_COLUMNS.items():
        if name not in table.column_names or not table.schema.field(name).type.equals(kind):
            return f"it has no column {name!r} of type {kind}"
        if name != "positions" and table[name].null_count:
            return f"a value of {name!r} is missing"
    lengths = [pc.list_value_length(table[name]) for name in OF_TOKENS]
    if any(not one.equals(lengths[0]) for one in lengths):
        return "a row has lists of different lengths"
    given = pc.list_value_length(table["positions"])
    if pc.any(pc.not_equal(given, lengths[0])).as_py():
        return "a row has other positions than tokens"
    return ""


def of_outcomes(rows: pa.Table, outcomes: pa.Table, skipped: bool = False) -> pa.Table:
    """The rows of the steps that gave the groups their outcomes, each once. Other attempts may have
    trained a group too, and a crash while files are merged leaves copies.

    Args:
        outcomes: of `Run.outcomes()`.
        skipped: also those of groups whose step was skipped.
    """
    names = ("attempt", "ordinal", "outcome", "ended_in", "trained_at_version")
    ended = {
        (attempt, ordinal): (outcome, ended_in, version)
        for attempt, ordinal, outcome, ended_in, version in zip(
            *(outcomes[name].to_pylist() for name in names), strict=True
        )
    }
    kept: dict[RowKey, int] = {}
    for row, key in enumerate(row_keys(rows)):
        outcome, ended_in, version = ended.get((key[2], key[3]), ("", -1, -1))
        taken = outcome == "trained" and version == key[1]
        if ended_in == key[0] and (taken or (skipped and outcome == "skipped")):
            kept[key] = row
    order = [kept[key] for key in sorted(kept, key=lambda key: key[2:])]
    return rows if order == [*range(len(rows))] else rows.take(pa.array(order, pa.int64()))


def row_keys(rows: pa.Table) -> list[RowKey]:
    """The key of each row of `trained/*.parquet`."""
    names = ("trained_in", "version", "attempt", "ordinal", "index")
    firsts = [at[0] if at else 0 for at in pc.list_slice(rows["positions"], 0, 1).to_pylist()]
    return [*zip(*(rows[name].to_pylist() for name in names), firsts, strict=True)]


def of_trajectories(rows: pa.Table) -> Rows:
    """The rows by trajectory."""
    found: Rows = {}
    for row in rows.to_pylist():
        found.setdefault((row["attempt"], row["ordinal"], row["index"]), []).append(row)
    return found


def at_tokens(rows: Sequence[Mapping[str, Any]], tokens: int) -> dict[str, list[Any]]:
    """OF_TOKENS of a trajectory with this many sampled tokens: one item each, None where a token
    was not trained."""
    found: dict[str, list[Any]] = {name: [None] * tokens for name in OF_TOKENS}
    for row in rows:
        at = row["positions"] or range(len(row["logprobs"]))
        for name, values in found.items():
            for position, value in zip(at, row[name], strict=True):
                if 0 <= position < tokens:
                    values[position] = value
    return found


def token_table(
    group: Mapping[str, Any], index: int, rows: Sequence[Mapping[str, Any]]
) -> pa.Table:
    """The sampled tokens of trajectory `index` of a group, with TOKEN_COLUMNS.

    Args:
        group: a row of `Run.groups()`.
        rows: the trajectory's rows of `trained/*.parquet`.
    """
    ids, spans = group["completion_ids"][index], group["versions"][index]
    learner = at_tokens(rows, len(ids))
    versions = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
    generator = group["logprobs"][index]
    ratios = [
        None if new is None or old is None else float(np.exp(np.float64(new) - np.float64(old)))
        for new, old in zip(learner["logprobs"], generator, strict=True)
    ]
    columns = {
        "token": range(len(ids)),
        "id": ids,
        "version": versions,
        "trained": [value is not None for value in learner["logprobs"]],
        "generator_logprob": generator,
        "learner_logprob": learner["logprobs"],
        "ratio": ratios,
        "weight": learner["weights"],
        "advantage": learner["advantages"],
        "clipped": learner["clipped"],
        "masked": learner["masked"],
    }
    return pa.table({name: pa.array(columns[name], kind) for name, kind in TOKEN_COLUMNS.items()})
