"""The audit of turns: sessions that cannot be are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from asyncrl.contracts.nodes import ORPHAN, Node
from asyncrl.contracts.rows import COLUMNS, SESSION_COLUMNS, TURN_COLUMNS, VersionSpan
from asyncrl.contracts.session_table import flat_completion, turns_of_group
from asyncrl.rundir.audited_turns import broken_sessions, generations, turn_starts


def turn(parent: int, *ids: int, version: int = 3, **changes: Any) -> Node:
    spans = (VersionSpan(version, 0, len(ids)),)
    return Node(
        parent,
        ids,
        sampled=True,
        logprobs=(-1.0,) * len(ids),
        versions=spans,
        finish_reason="stop",
        replica="r",
        started_at=1.0,
        finished_at=2.0,
        **changes,
    )


NODES = [
    Node(None, (5, 6)),
    turn(0, 7, 8),
    turn(0, 9, 10, status=ORPHAN),
    Node(1, (11,)),
    turn(3, 12, version=4),
]


def row() -> dict[str, Any]:
    completion, mask = flat_completion(NODES, "")
    return {
        **turns_of_group([NODES]),
        "completion_ids": [completion.token_ids],
        "logprobs": [completion.logprobs],
        "loss_mask": [mask],
        "versions": [
            [{"version": s.version, "start": s.start, "end": s.end} for s in completion.versions]
        ],
        "session_end": ["done"],
    }


def broken(found: dict[str, Any]) -> bool:
    kinds = {**COLUMNS, **TURN_COLUMNS, **SESSION_COLUMNS}
    table = pa.table({name: pa.array([value], kinds[name]) for name, value in found.items()})
    return bool(broken_sessions(table, np.array([5]))[0])


def test_a_session_as_written_is_whole() -> None:
    assert not broken(row())
    assert [made.newest for made in generations(row())] == [3, 3, 4]


def moved_mask(found: dict[str, Any]) -> None:
    found["loss_mask"] = [[0, 0, 1, 1, 1]]


def swapped_statuses(found: dict[str, Any]) -> None:
    found["turn_status"] = [ORPHAN, "ok", "ok"]


def older_weights(found: dict[str, Any]) -> None:
    found["versions"][0][2]["version"] = 2


def negative_context(found: dict[str, Any]) -> None:
    found["turn_context"] = [[5, 6], [5, 6], [-1]]


def time_goes_back(found: dict[str, Any]) -> None:
    found["turn_finished_at"] = [0.5, 2.0, 2.0]


def unknown_end(found: dict[str, Any]) -> None:
    found["session_end"] = ["won"]


def no_tree(found: dict[str, Any]) -> None:
    found["turn_parent"] = [-1, -1, 5]


@pytest.mark.parametrize(
    "change",
    [
        moved_mask,
        swapped_statuses,
        older_weights,
        negative_context,
        time_goes_back,
        unknown_end,
        no_tree,
    ],
)
def test_a_changed_session_is_found(change: Callable[[dict[str, Any]], None]) -> None:
    found = row()
    change(found)
    assert broken(found)


def test_turns_begin_where_the_ones_before_them_end() -> None:
    kinds = {**COLUMNS, **TURN_COLUMNS}
    names = ("turn_trajectory", "turn_tokens", "completion_ids")
    table = pa.table({name: pa.array([row()[name]] * 2, kinds[name]) for name in names})
    starts = turn_starts(table)
    assert (starts % (1 << 40)).tolist() == [0, 2, 4, 0, 2, 4]
    assert (starts >> 40).tolist() == [0, 0, 0, 1, 1, 1]
