"""The turns of sessions in an audit: their faults, and who generated them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pyarrow as pa

from asyncrl.contracts.nodes import Node
from asyncrl.contracts.rows import SESSION_ENDS, TURN_ADVANTAGE_COLUMN
from asyncrl.contracts.session_table import (
    NODE_COLUMNS,
    SessionsRow,
    nodes_of_group,
    received_turns,
)
from asyncrl.sessions.session_rows import session_rows

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


@dataclass(frozen=True, slots=True)
class TurnCredit:
    """What the advantages of a group's turns are from, for each of its sessions, and what they
    are. Turns that an agent never received are left out."""

    rewards: tuple[tuple[float | None, ...], ...]
    advantages: tuple[float | None, ...]
    """The advantages of the sessions. None: the session is not trained."""
    written: tuple[tuple[float | None, ...], ...]
    """The advantages of the turns."""


def turn_credit(row: Mapping[str, Any]) -> TurnCredit | None:
    """The credit of the turns of a group's row; None if its turns have no advantages.

    Raises:
        ValueError, IndexError, TypeError: its columns do not agree.
    """
    if row.get(TURN_ADVANTAGE_COLUMN) is None:
        return None
    advantages = row["advantage"]
    indices = received_turns(row["turn_trajectory"], row["turn_status"], len(advantages))

    def of_sessions(values: Sequence[float | None]) -> tuple[tuple[float | None, ...], ...]:
        return tuple(tuple(values[index] for index in session) for session in indices)

    return TurnCredit(
        of_sessions(row["turn_reward"]),
        tuple(advantages),
        of_sessions(row[TURN_ADVANTAGE_COLUMN]),
    )


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
    """Trajectories whose turns cannot be those of a session: see `_broken`.

    Args:
        lengths: tokens of each trajectory of the table.
    """
    found = np.zeros(len(lengths), bool)
    if not has_turns(table):
        return found
    first = 0
    for row in table.select([*NODE_COLUMNS, "loss_mask", "session_end"]).to_pylist():
        mine = slice(first, first + len(row["completion_ids"]))
        first = mine.stop
        try:
            sessions = nodes_of_group(cast("SessionsRow", row))
            found[mine] = [
                _broken(nodes, mask, end)
                for nodes, mask, end in zip(
                    sessions, row["loss_mask"], row["session_end"], strict=True
                )
            ]
        except (ValueError, TypeError, KeyError):
            found[mine] = True
    return found


def _broken(nodes: Sequence[Node], mask: Sequence[int], end: str) -> bool:
    """Whether a session cannot be: its mask is not that of its turns, a turn has older weights than
    one before it, a context has no token ids, a time goes back, or its end is unknown."""
    turns = [node for node in nodes if node.sampled]
    wanted = [int(turn.status == "ok") for turn in turns for _ in turn.token_ids]
    if list(mask) != wanted or session_rows(nodes).counts.trained != sum(mask):
        return True
    if end not in SESSION_ENDS:
        return True
    newest: dict[int, int] = {}
    for index, node in enumerate(nodes):
        before = -1 if node.parent is None else newest[node.parent]
        versions = [span.version for span in node.versions]
        if versions and min(versions) < before:
            return True
        newest[index] = max([before, *versions])
        if min(node.token_ids, default=0) < 0 or not node.started_at <= node.finished_at:
            return True
    return False


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
