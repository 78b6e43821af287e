"""The turns of sessions in an audit: their faults, and who generated them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import pyarrow as pa

from asyncrl.contracts.session_table import NODE_COLUMNS, SessionsRow, nodes_of_group
from asyncrl.sessions.rows import session_rows

__all__ = ["BEGIN", "Generation", "broken_sessions", "generations", "has_turns", "turn_starts"]

BEGIN = 1 << 40
"""More than the tokens of a trajectory."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What one replica generated at once: a group, or a turn of a session."""

    replica: str
    started_at: float
    finished_at: float
    oldest: int
    newest: int
    """Oldest and newest version of its tokens."""


def has_turns(table: pa.Table) -> bool:
    """Whether the trajectories are sessions."""
    return "turn_tokens" in table.column_names


def turn_starts(table: pa.Table) -> np.ndarray:
    """For each turn of the table, its trajectory's number among all trajectories, times BEGIN, plus
    where the turn begins among its trajectory's tokens."""
    found: list[int] = []
    first = 0
    for row in table.select(["turn_trajectory", "turn_tokens", "completion_ids"]).to_pylist():
        at: dict[int, int] = {}
        for trajectory, tokens in zip(row["turn_trajectory"], row["turn_tokens"], strict=True):
            begin = at.get(trajectory, 0)
            found.append((first + trajectory) * BEGIN + begin)
            at[trajectory] = begin + tokens
        first += len(row["completion_ids"])
    return np.array(found, dtype=np.int64)


def broken_sessions(table: pa.Table, lengths: np.ndarray) -> np.ndarray:
    """Trajectories whose turns are no tree, or whose loss mask is not that of their turns.

    Args:
        lengths: tokens of each trajectory of the table.
    """
    found = np.zeros(len(lengths), bool)
    if not has_turns(table):
        return found
    first = 0
    for row in table.select([*NODE_COLUMNS, "loss_mask"]).to_pylist():
        mine = slice(first, first + len(row["completion_ids"]))
        first = mine.stop
        try:
            sessions = nodes_of_group(cast("SessionsRow", row))
            trained = [session_rows(nodes).counts.trained for nodes in sessions]
        except (ValueError, TypeError, KeyError):
            found[mine] = True
            continue
        found[mine] = [
            sum(mask) != count for mask, count in zip(row["loss_mask"], trained, strict=True)
        ]
    return found


def generations(row: dict[str, object]) -> tuple[Generation, ...]:
    """The turns of a group's row that have tokens. Empty if they are no tree."""
    try:
        sessions = nodes_of_group(cast("SessionsRow", row))
    except (ValueError, TypeError, KeyError):
        return ()
    return tuple(
        Generation(
            node.replica,
            node.started_at,
            node.finished_at,
            min(span.version for span in node.versions),
            max(span.version for span in node.versions),
        )
        for nodes in sessions
        for node in nodes
        if node.versions
    )
