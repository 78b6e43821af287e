"""Converts the sessions of a scored group to training examples: one for each row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pyarrow as pa

from asyncrl.contracts.nodes import Node
from asyncrl.contracts.rows import (
    REFERENCE_COLUMN,
    TEACHER_IDS_COLUMN,
    TOKEN_REWARDS_COLUMN,
    TRUNCATED,
    TURN_ADVANTAGE_COLUMN,
)
from asyncrl.contracts.session_table import NODE_COLUMNS, SessionsRow, nodes_of_group
from asyncrl.models.micro_batches import WHOLE, Example, trajectories_of
from asyncrl.sessions.rows import SessionRow, session_rows

__all__ = ["has_sessions", "rows_of_trajectory", "session_examples", "with_trajectory_units"]


def has_sessions(table: pa.Table) -> bool:
    """Whether the trajectories of the groups are sessions."""
    return "turn_parent" in table.column_names


def session_examples(table: pa.Table, row: int) -> list[Example]:
    """The rows of the trainable sessions of one group: those with status ok.

    Raises:
        ValueError: a session with status ok has no advantage, the columns do not agree, or they
            have log-probs or rewards that are not supported for sessions.
    """
    unread = sorted(
        {REFERENCE_COLUMN, TOKEN_REWARDS_COLUMN, TEACHER_IDS_COLUMN} & set(table.column_names)
    )
    if unread:
        raise ValueError(
            f"columns {unread} are not supported for sessions; train without a KL term, a teacher"
            " and rewards of single tokens"
        )
    names = [name for name in (*NODE_COLUMNS, TURN_ADVANTAGE_COLUMN) if name in table.column_names]
    group = table.slice(row, 1).select([*names, "ordinal", "status", "advantage"]).to_pylist()[0]
    sessions = nodes_of_group(cast("SessionsRow", group))
    of_turns = group.get(TURN_ADVANTAGE_COLUMN)
    examples: list[Example] = []
    for index, (nodes, status, advantage) in enumerate(
        zip(sessions, group["status"], group["advantage"], strict=True)
    ):
        if status != "ok":
            continue
        if advantage is None:
            raise ValueError(
                f"group {group['ordinal']}: trajectory {index} has status ok but no advantage;"
                " score it again"
            )
        of_nodes = np.full(len(nodes), float(advantage))
        if of_turns is not None:
            of_nodes[_turns(nodes)] = [
                float(value if value is not None else advantage)
                for value, trajectory in zip(of_turns, group["turn_trajectory"], strict=True)
                if trajectory == index
            ]
        examples += [
            _example(found, nodes, group["ordinal"], index, of_nodes)
            for found in session_rows(nodes).rows
        ]
    return examples


def _turns(nodes: Sequence[Node]) -> list[int]:
    """The nodes that are turns, in the order of a group's columns of turns."""
    return [index for index, node in enumerate(nodes) if node.sampled]


def _example(
    row: SessionRow, nodes: Sequence[Node], ordinal: int, index: int, advantages: np.ndarray
) -> Example:
    """A row as an example. What comes before its first trained token is its prompt.

    Args:
        advantages: of each node.
    """
    begin = int(np.flatnonzero(row.trained)[0])
    of_tokens = advantages[row.nodes[begin:]]
    last = nodes[int(row.nodes[-1])]
    return Example(
        tokens=row.token_ids,
        prompt_length=begin,
        loss_mask=row.trained[begin:],
        behavior_logprobs=row.logprobs[begin:],
        advantage=of_tokens if np.ptp(advantages) else float(of_tokens[0]),
        versions=row.versions[begin:],
        truncated=last.finish_reason in TRUNCATED,
        group=ordinal,
        trajectory=index,
        leaf=row.leaf,
    )


def rows_of_trajectory(examples: Sequence[Example]) -> list[int]:
    """For each example, the number of rows of its trajectory."""
    numbers = trajectories_of(examples)
    counts = Counter(numbers)
    return [counts[number] for number in numbers]


def with_trajectory_units(examples: Sequence[Example]) -> list[Example]:
    """The examples, where the rows of one session stay in one micro-batch. An objective that
    compares whole trajectories needs all of their tokens at once."""
    return [
        example if example.leaf == WHOLE else replace(example, unit=number)
        for example, number in zip(examples, trajectories_of(examples), strict=True)
    ]
