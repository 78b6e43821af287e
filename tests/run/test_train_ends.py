"""The audit of how sessions ended: which of them may be trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ended_sessions import rewarded_table
from independent_audit import wrong_ends
from unread_books import unread_books

from asyncrl.config import Config
from asyncrl.contracts.nodes import Node
from asyncrl.contracts.rows import SESSION_ENDS, VersionSpan
from asyncrl.environments.running import Ended
from asyncrl.preflight.specs import scoring_spec
from asyncrl.rewards.score import score_table
from asyncrl.run.audit.check import Check
from asyncrl.run.audit.group_checks import check_ends
from asyncrl.rundir.audited_rows import Row, read_rows

NODES = [
    Node(None, (1,)),
    Node(
        0,
        (2, 3),
        sampled=True,
        logprobs=(-1.0, -1.0),
        versions=(VersionSpan(0, 0, 2),),
        finish_reason="stop",
        replica="r",
        started_at=1.0,
        finished_at=2.0,
    ),
]
DEFAULT = ("done", "length", "turns")
TRAINED = (("done",), DEFAULT, (*DEFAULT, "env_error"), ("done", "deadline", "closed"))
"""Settings of `environment.train_ends`."""


def config(trains: Sequence[str]) -> Config:
    return Config.model_validate(
        {
            "name": "ends",
            "max_steps": 1,
            "model": {"path": "unused"},
            "data": {"train": "unused", "max_prompt_length": 2, "max_length": 16},
            "environment": {"function": "m:solve", "train_ends": list(trains)},
            "rollout": {"n_samples_per_prompt": len(SESSION_ENDS), "max_completion_length": 4},
        }
    )


def scored(trains: Sequence[str]) -> pa.Table:
    """A scored group with a session for each end. All have a reward, but one."""
    rewards = [None if end == "turns" else float(at) for at, end in enumerate(SESSION_ENDS)]
    ends = [
        Ended(cast(Any, end), reward) for end, reward in zip(SESSION_ENDS, rewards, strict=True)
    ]
    table = rewarded_table([(NODES, ended) for ended in ends], rewards)
    return score_table(table, scoring_spec(config(trains)))


def read(table: pa.Table, folder: Path) -> Row:
    pq.write_table(table, folder / "group.parquet")
    (row,) = read_rows(folder / "group.parquet")
    return row


def checked(row: Row, trains: Sequence[str] | None) -> Check:
    record = {} if trains is None else {"train_ends": list(trains)}
    return check_ends(unread_books(rows={(0, 3): row}, attempts=[record]))


@pytest.mark.parametrize("trains", TRAINED)
def test_what_a_run_masks_and_trains_by_its_ends_passes(
    trains: tuple[str, ...], tmp_path: Path
) -> None:
    row = read(scored(trains), tmp_path)
    assert row.faults == () and checked(row, trains).passed
    assert {end for end, status in row.endings if status == "ok"} == {*trains} - {"turns"}
    for others in TRAINED:
        assert checked(row, others).passed == (others == trains), (others, trains)
        assert (wrong_ends(scored(trains).to_pylist()[0], list(others)) == []) == (others == trains)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("deadline", "ok"),
        ("closed", "unscored"),
        ("env_error", "agent_error"),
        ("done", "closed"),
        ("turns", "turns"),
    ],
)
def test_a_session_with_the_status_of_another_end_is_named(
    end: str, status: str, tmp_path: Path
) -> None:
    table = scored(DEFAULT)
    statuses = table["status"].to_pylist()
    statuses[0][SESSION_ENDS.index(end)] = status
    place = table.column_names.index("status")
    row = read(table.set_column(place, "status", pa.array(statuses)), tmp_path)
    check = checked(row, DEFAULT)
    assert not check.passed and check.summary.endswith(f"wrong: 3 ({end} is {status})")


def test_an_attempt_without_the_record_is_not_checked(tmp_path: Path) -> None:
    row = read(scored(DEFAULT), tmp_path)
    check = checked(row, None)
    unknown = "1 groups of sessions; not checked, without a record of train_ends: attempts [0]"
    assert check.passed and check.summary == unknown
