"""The turns of sessions as Arrow columns of their group's row, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from asyncrl.contracts.nodes import ORPHAN, Node
from asyncrl.contracts.rows import Completion, SpanRow, VersionSpan

NO_PARENT = -1


class TurnsRow(TypedDict):
    """A group's turns, as Python values, with one item for each of its N turns. The turns of a
    trajectory come in the order in which they were added to its session."""

    turn_trajectory: Sequence[int]
    """[N] the trajectory of each turn."""
    turn_parent: Sequence[int]
    """[N] the turn that it continues, below its own index; NO_PARENT: none."""
    turn_context: Sequence[Sequence[int]]
    """[N] the tokens between that turn and this one's: prompt, environment, template."""
    turn_tokens: Sequence[int]
    """[N] the number of its sampled tokens."""
    turn_status: Sequence[str]
    turn_finish_reason: Sequence[str]
    turn_branch_reason: Sequence[str]
    turn_request_hash: Sequence[str]
    turn_replica: Sequence[str]
    turn_started_at: Sequence[float]
    turn_finished_at: Sequence[float]


class SessionsRow(TurnsRow):
    """What `nodes_of_group` reads of a group's row. [G] trajectories have [T] sampled tokens each,
    turn after turn."""

    completion_ids: Sequence[Sequence[int]]
    """[G][T], as are `logprobs`."""
    logprobs: Sequence[Sequence[float]]
    versions: Sequence[Sequence[SpanRow]]


NODE_COLUMNS = tuple(SessionsRow.__annotations__)
"""The columns that `nodes_of_group` reads."""


def turns_of_group(sessions: Sequence[Sequence[Node]]) -> TurnsRow:
    """The columns of a group with these sessions, one for each trajectory. Context after the last
    turn of a branch is left out, because no turn depends on it.

    Raises:
        ValueError: a turn does not follow a context, or a context does not follow a turn.
    """
    columns: dict[str, list[object]] = {name: [] for name in TurnsRow.__annotations__}
    for trajectory, nodes in enumerate(sessions):
        rows: dict[int, int] = {}
        contexts: set[int | None] = set()
        for index, node in enumerate(nodes):
            if not node.sampled:
                continue
            context = None if node.parent is None else nodes[node.parent]
            if context is None or context.sampled:
                raise ValueError(f"turn {index} of trajectory {trajectory} follows no context")
            if context.parent is not None and context.parent not in rows:
                raise ValueError(f"the context of turn {index} follows another context")
            first = node.parent not in contexts
            contexts.add(node.parent)
            rows[index] = len(columns["turn_parent"])
            for name, value in _turn(trajectory, node, context, first).items():
                columns[name].append(value)
            columns["turn_parent"].append(
                NO_PARENT if context.parent is None else rows[context.parent]
            )
    return columns  # type: ignore[return-value]


def _turn(trajectory: int, node: Node, context: Node, first: bool) -> dict[str, object]:
    """The items of a turn. Why its context is a branch counts once, at its first turn."""
    return {
        "turn_trajectory": trajectory,
        "turn_context": context.token_ids,
        "turn_tokens": len(node.token_ids),
        "turn_status": node.status,
        "turn_finish_reason": node.finish_reason,
        "turn_branch_reason": node.branch_reason or (context.branch_reason if first else ""),
        "turn_request_hash": node.request_hash,
        "turn_replica": node.replica,
        "turn_started_at": node.started_at,
        "turn_finished_at": node.finished_at,
    }


def flat_completion(nodes: Sequence[Node], text: str) -> tuple[Completion, tuple[int, ...]]:
    """The sampled tokens of a session, turn after turn, and their loss mask.

    Args:
        text: what reward functions get as its completion.
    """
    turns = [node for node in nodes if node.sampled]
    ids: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    spans: list[VersionSpan] = []
    for turn in turns:
        at = len(ids)
        spans += [VersionSpan(one.version, at + one.start, at + one.end) for one in turn.versions]
        ids += turn.token_ids
        logprobs += turn.logprobs
        mask += [int(turn.status == "ok")] * len(turn.token_ids)
    completion = Completion(
        tuple(ids),
        tuple(logprobs),
        tuple(spans),
        _last_reason(turns),
        text,
        tuple(len(turn.token_ids) for turn in turns),
    )
    return completion, tuple(mask)


def _last_reason(turns: Sequence[Node]) -> str:
    """The finish reason of the last turn that its agent got."""
    got = [turn for turn in turns if turn.status != ORPHAN] or turns
    return got[-1].finish_reason if got else "abort"


def nodes_of_group(row: SessionsRow) -> list[list[Node]]:
    """The sessions of a group's row, one for each trajectory: a context and a turn for each turn of
    its columns. So `turns_of_group` gives the same columns again.

    Raises:
        ValueError: lists have different lengths, or the row is not one of sessions.
    """
    if missing := sorted(name for name in NODE_COLUMNS if name not in row):
        raise ValueError(f"columns {missing} are missing")
    trajectories = len(row["completion_ids"])
    sessions: list[list[Node]] = [[] for _ in range(trajectories)]
    begins, nodes_at = [0] * trajectories, list[int]()
    """Where each trajectory's next turn begins, and each turn's node in its session."""
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
        nodes, begin = sessions[trajectory], begins[trajectory]
        before = None if parent == NO_PARENT else nodes_at[parent]
        nodes.append(
            Node(before, tuple(one["turn_context"]), branch_reason=one["turn_branch_reason"])
        )
        nodes_at.append(len(nodes))
        nodes.append(_turn_node(row, trajectory, begin, one, len(nodes) - 1))
        begins[trajectory] = begin + one["turn_tokens"]
    lengths = [len(ids) for ids in row["completion_ids"]]
    if begins != lengths:
        raise ValueError(f"turns have {begins} tokens, and the trajectories {lengths}")
    return sessions


def turn_rewards(nodes: Sequence[Node], given: Sequence[tuple[int, float]]) -> list[float | None]:
    """The items of the column `turn_reward` for one session; None for a turn without a reward.

    Args:
        given: pairs of a turn's node and its reward.
    """
    of_node = dict(given)
    return [of_node.get(index) for index, node in enumerate(nodes) if node.sampled]


def received_turns(
    turn_trajectory: Sequence[int], turn_status: Sequence[str], trajectories: int
) -> list[list[int]]:
    """For each trajectory of a group, the indices of its turns among the group's turns, without
    turns that its agent never received."""
    found: list[list[int]] = [[] for _ in range(trajectories)]
    for index, (trajectory, status) in enumerate(zip(turn_trajectory, turn_status, strict=True)):
        if status != ORPHAN:
            found[trajectory].append(index)
    return found


def _turn_node(
    row: SessionsRow, trajectory: int, begin: int, turn: Mapping[str, Any], parent: int
) -> Node:
    """The node of a turn whose sampled tokens begin at `begin` in its trajectory."""
    end = begin + turn["turn_tokens"]
    return Node(
        parent,
        tuple(row["completion_ids"][trajectory][begin:end]),
        sampled=True,
        logprobs=tuple(row["logprobs"][trajectory][begin:end]),
        versions=tuple(
            VersionSpan(span["version"], span["start"] - begin, span["end"] - begin)
            for span in row["versions"][trajectory]
            if begin <= span["start"] < end
        ),
        status=turn["turn_status"],
        finish_reason=turn["turn_finish_reason"],
        replica=turn["turn_replica"],
        request_hash=turn["turn_request_hash"],
        started_at=turn["turn_started_at"],
        finished_at=turn["turn_finished_at"],
    )
