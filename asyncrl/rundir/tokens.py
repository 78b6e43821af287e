"""The tokens of one trajectory, with what generator and learner computed at each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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


def without_copies(rows: pa.Table) -> pa.Table:
    """The rows of the last attempt that trained each group, each once. A crash while files are
    merged leaves copies."""
    keys = row_keys(rows)
    last: dict[tuple[int, int], int] = {}
    for trained_in, _, attempt, ordinal, *_ in keys:
        last[attempt, ordinal] = max(trained_in, last.get((attempt, ordinal), 0))
    kept = {key: row for row, key in enumerate(keys) if key[0] == last[key[2], key[3]]}
    order = sorted(kept, key=lambda key: key[2:])
    return rows.take(pa.array([kept[key] for key in order], pa.int64()))


def row_keys(rows: pa.Table) -> list[RowKey]:
    """The key of each row of `trained/*.parquet`."""
    names = ("trained_in", "version", "attempt", "ordinal", "index")
    firsts = [at[0] if at else 0 for at in pc.list_slice(rows["positions"], 0, 1).to_pylist()]
    return [*zip(*(rows[name].to_pylist() for name in names), firsts, strict=True)]


def of_trajectories(rows: pa.Table, ordinals: Sequence[int] | None = None) -> Rows:
    """The rows by trajectory.

    Args:
        ordinals: of the groups to read; None = all.
    """
    if ordinals is not None:
        rows = rows.filter(pc.is_in(rows["ordinal"], pa.array(ordinals, pa.int64())))
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
