"""The turns of sessions as Arrow columns of their group's row, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import pyarrow as pa

from asyncrl.contracts.nodes import Node
from asyncrl.contracts.rows import SpanRow, VersionSpan

__all__ = ["TURN_COLUMNS", "TurnsRow", "nodes_of_group", "turns_of_group"]

TURN_COLUMNS: dict[str, pa.DataType] = {
    "turn_trajectory": pa.list_(pa.int32()),
    "turn_parent": pa.list_(pa.int32()),
    "turn_context": pa.list_(pa.list_(pa.int32())),
    "turn_status": pa.list_(pa.string()),
    "turn_branch_reason": pa.list_(pa.string()),
    "turn_request_hash": pa.list_(pa.string()),
    "turn_replica": pa.list_(pa.string()),
    "turn_started_at": pa.list_(pa.float64()),
    "turn_finished_at": pa.list_(pa.float64()),
}
"""Columns of groups whose trajectories are sessions. A group has N turns, and one item for each in
these lists. Its completions, log-probs, version spans and finish reasons are also one for each
turn."""

NO_PARENT = -1


class TurnsRow(TypedDict):
    """A group's turns, as Python values: N turns, of T sampled tokens each."""

    turn_trajectory: Sequence[int]
    """[N] the trajectory of each turn."""
    turn_parent: Sequence[int]
    """[N] the turn that it continues, below its own index; NO_PARENT: none."""
    turn_context: Sequence[Sequence[int]]
    """[N] the tokens between that turn and this one's: prompt, environment, template."""
    turn_status: Sequence[str]
    turn_branch_reason: Sequence[str]
    turn_request_hash: Sequence[str]
    turn_replica: Sequence[str]
    turn_started_at: Sequence[float]
    turn_finished_at: Sequence[float]
    completion_ids: Sequence[Sequence[int]]
    """[N][T], as are `logprobs`."""
    logprobs: Sequence[Sequence[float]]
    versions: Sequence[Sequence[SpanRow]]
    finish_reason: Sequence[str]


def turns_of_group(sessions: Sequence[Sequence[Node]]) -> TurnsRow:
    """The columns of a group with these sessions, one for each trajectory. Context after the last
    turn of a branch is left out, because no turn depends on it.

    Raises:
        ValueError: a turn does not follow a context, or a context does not follow a turn.
    """
    columns: dict[str, list[object]] = {name: [] for name in TurnsRow.__annotations__}
    for trajectory, nodes in enumerate(sessions):
        places: dict[int, int] = {}
        contexts: set[int | None] = set()
        for index, node in enumerate(nodes):
            if not node.sampled:
                continue
            context = None if node.parent is None else nodes[node.parent]
            if context is None or context.sampled:
                raise ValueError(f"turn {index} of trajectory {trajectory} follows no context")
            if context.parent is not None and context.parent not in places:
                raise ValueError(f"the context of turn {index} follows another context")
            first = node.parent not in contexts
            contexts.add(node.parent)
            places[index] = len(columns["turn_parent"])
            for name, value in _turn(trajectory, node, context, first).items():
                columns[name].append(value)
            columns["turn_parent"].append(
                NO_PARENT if context.parent is None else places[context.parent]
            )
    return columns  # type: ignore[return-value]


def _turn(trajectory: int, node: Node, context: Node, first: bool) -> dict[str, object]:
    """The items of a turn. Why its context is a branch counts once, at its first turn."""
    return {
        "turn_trajectory": trajectory,
        "turn_context": context.token_ids,
        "turn_status": node.status,
        "turn_branch_reason": node.branch_reason or (context.branch_reason if first else ""),
        "turn_request_hash": node.request_hash,
        "turn_replica": node.replica,
        "turn_started_at": node.started_at,
        "turn_finished_at": node.finished_at,
        "completion_ids": node.token_ids,
        "logprobs": node.logprobs,
        "versions": [
            {"version": span.version, "start": span.start, "end": span.end}
            for span in node.versions
        ],
        "finish_reason": node.finish_reason,
    }


def nodes_of_group(row: TurnsRow, trajectories: int) -> list[list[Node]]:
    """The sessions of a group's row, one for each trajectory: a context and a turn for each item of
    its lists. So `turns_of_group` gives the same columns again.

    Raises:
        ValueError: lists have different lengths, or the row is not one of sessions.
    """
    sessions: list[list[Node]] = [[] for _ in range(trajectories)]
    nodes_at: list[int] = []
    """The index of each turn's node in its session."""
    if missing := sorted(name for name in TurnsRow.__annotations__ if name not in row):
        raise ValueError(f"columns {missing} are missing")
    columns = [row[name] for name in TurnsRow.__annotations__]  # type: ignore[literal-required]
    for turn in zip(*columns, strict=True):
        one = dict(zip(TurnsRow.__annotations__, turn, strict=True))
        trajectory, parent = one["turn_trajectory"], one["turn_parent"]
        if not 0 <= trajectory < trajectories:
            raise ValueError(f"a turn belongs to trajectory {trajectory} of {trajectories}")
        if parent != NO_PARENT and not (
            0 <= parent < len(nodes_at) and row["turn_trajectory"][parent] == trajectory
        ):
            raise ValueError(
                f"turn {len(nodes_at)} continues turn {parent}, which is not an earlier one of its"
                " trajectory"
            )
        nodes = sessions[trajectory]
        before = None if parent == NO_PARENT else nodes_at[parent]
        nodes.append(
            Node(before, tuple(one["turn_context"]), branch_reason=one["turn_branch_reason"])
        )
        nodes_at.append(len(nodes))
        nodes.append(
            Node(
                len(nodes) - 1,
                tuple(one["completion_ids"]),
                sampled=True,
                logprobs=tuple(one["logprobs"]),
                versions=tuple(VersionSpan(**span) for span in one["versions"]),
                status=one["turn_status"],
                finish_reason=one["finish_reason"],
                replica=one["turn_replica"],
                request_hash=one["turn_request_hash"],
                started_at=one["turn_started_at"],
                finished_at=one["turn_finished_at"],
            )
        )
    return sessions
