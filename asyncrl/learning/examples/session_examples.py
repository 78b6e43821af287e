"""Converts the sessions of a scored group to training examples: one for each row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pyarrow as pa

from asyncrl.contracts.nodes import Node
from asyncrl.contracts.rows import (
    REFERENCE_COLUMN,
    TEACHER_IDS_COLUMN,
    TEACHER_TOKENS,
    TOKEN_REWARDS_COLUMN,
    TRUNCATED,
    TURN_ADVANTAGE_COLUMN,
)
from asyncrl.contracts.session_table import NODE_COLUMNS, SessionsRow, nodes_of_group
from asyncrl.models.micro_batches import WHOLE, Example, trajectories_of
from asyncrl.sessions.session_rows import SessionRow, session_rows


def has_sessions(table: pa.Table) -> bool:
    """Whether the trajectories of the groups are sessions."""
    return "turn_parent" in table.column_names


def session_examples(table: pa.Table, row: int) -> list[Example]:
    """The rows of the trainable sessions of one group: those with status ok.

    Raises:
        ValueError: a session with status ok has no advantage, the columns do not agree, or they
            have rewards of tokens.
    """
    if TOKEN_REWARDS_COLUMN in table.column_names:
        raise ValueError(
            f"the column {TOKEN_REWARDS_COLUMN!r} is not supported for sessions; train without"
            " rewards of single tokens"
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
        scores = _frozen_scores(table, row, index)
        examples += [
            _example(found, nodes, group["ordinal"], index, of_nodes, scores)
            for found in session_rows(nodes).rows
        ]
    return examples


@dataclass(frozen=True, slots=True)
class _FrozenScores:
    """What a reference policy or a teacher gave to the T sampled tokens of a session. An item is
    None if neither gave it."""

    logprobs: np.ndarray | None = None
    """[T]"""
    ids: np.ndarray | None = None
    """[T, K], as are `of_ids`."""
    of_ids: np.ndarray | None = None


def _frozen_scores(table: pa.Table, row: int, index: int) -> _FrozenScores:
    """The scores of trajectory `index` of a group."""
    if REFERENCE_COLUMN not in table.column_names:
        return _FrozenScores()
    logprobs = _values(table, REFERENCE_COLUMN, row, index)
    if TEACHER_IDS_COLUMN not in table.column_names:
        return _FrozenScores(logprobs)
    ids, of_ids = (
        _values(table, name, row, index).reshape(len(logprobs), -1) for name in TEACHER_TOKENS
    )
    return _FrozenScores(logprobs, ids, of_ids)


def _values(table: pa.Table, name: str, row: int, index: int) -> np.ndarray:
    return np.asarray(table[name][row].values[index].values.to_numpy(zero_copy_only=False))


def _turns(nodes: Sequence[Node]) -> list[int]:
    """The nodes that are turns, in the order of a group's columns of turns."""
    return [index for index, node in enumerate(nodes) if node.sampled]


def _example(
    row: SessionRow,
    nodes: Sequence[Node],
    ordinal: int,
    index: int,
    advantages: np.ndarray,
    scores: _FrozenScores,
) -> Example:
    """A row as an example. What comes before its first trained token is its prompt.

    Args:
        advantages: of each node.
    """
    begin = row.prompt_length
    # What context tokens get is never used: they have no loss.
    positions = row.positions[begin:]
    of_tokens = advantages[row.nodes[begin:]]
    last = nodes[int(row.nodes[-1])]
    return Example(
        tokens=row.token_ids,
        prompt_length=begin,
        loss_mask=row.trained[begin:],
        behavior_logprobs=row.logprobs[begin:],
        advantage=of_tokens if np.ptp(advantages) else float(of_tokens[0]),
        versions=row.versions[begin:],
        reference_logprobs=None if scores.logprobs is None else scores.logprobs[positions],
        teacher_ids=None if scores.ids is None else scores.ids[positions],
        teacher_logprobs=None if scores.of_ids is None else scores.of_ids[positions],
        truncated=last.finish_reason in TRUNCATED,
        positions=positions,
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
