"""Rewards of turns on their way: from the environment's return to the learner, the audit and the
reader."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ended_sessions import rewarded_table
from unread_books import unread_books

from asyncrl.config import Config
from asyncrl.contracts.nodes import ORPHAN, Node
from asyncrl.contracts.rows import VersionSpan
from asyncrl.control.diagnostics import _sessions
from asyncrl.environments.running import Ended
from asyncrl.learning.examples.batches import examples_of
from asyncrl.observe.samples import samples_text
from asyncrl.preflight.specs import scoring_spec
from asyncrl.rewards.score import score_table
from asyncrl.rewards.summary import scored_from_text, scored_to_text, summaries
from asyncrl.run.audit.books import Books
from asyncrl.run.audit.group_checks import check_turn_advantages
from asyncrl.rundir.audited_rows import read_rows
from asyncrl.rundir.reader import _explode


def turn(parent: int, *ids: int, status: str = "ok") -> Node:
    return Node(
        parent,
        ids,
        sampled=True,
        logprobs=(-1.0,) * len(ids),
        versions=(VersionSpan(0, 0, len(ids)),),
        status=status,
        finish_reason="stop",
        replica="r",
        started_at=1.0,
        finished_at=2.0,
    )


LONG = [Node(None, (1,)), turn(0, 2, 3), Node(1, (4,)), turn(2, 5), Node(3, (4,)), turn(4, 6)]
"""Three turns."""
RETRIED = [Node(None, (1,)), turn(0, 2, status=ORPHAN), turn(0, 3), Node(2, (4,)), turn(3, 5)]
"""Two turns. Its agent never received another one."""
SHORT = [Node(None, (1,)), turn(0, 7)]
GIVEN = [
    (LONG, Ended("done", 3.0, turn_rewards=[(1, 1.0), (3, 0.0), (5, 9.0)])),
    (RETRIED, Ended("done", 1.0, turn_rewards=[(2, 0.0), (4, 4.0)])),
    (SHORT, Ended("done", 2.0)),
    (LONG, Ended("env_error", None, turn_rewards=[(1, 100.0)])),
]


def config(loss: str = "ppo", advantage: str = "dr_grpo", **turns: Any) -> Config:
    return Config.model_validate(
        {
            "name": "turns",
            "max_steps": 1,
            "model": {"path": "unused"},
            "data": {"train": "unused", "max_prompt_length": 2, "max_length": 16},
            "environment": {"function": "m:solve"},
            "rollout": {"n_samples_per_prompt": 4, "max_completion_length": 4},
            "algorithm": {"loss": loss, "advantage": {"name": advantage, "turns": turns or None}},
            "staleness": {"max_staleness": 0},
        }
    )


def scored(chosen: Config) -> pa.Table:
    """One scored group, as the run writes it."""
    table = rewarded_table(GIVEN, [ended.reward for _, ended in GIVEN])
    return score_table(table, scoring_spec(chosen))


def test_every_turn_gets_its_advantage() -> None:
    row = scored(config(coef=0.5)).to_pylist()[0]
    assert row["turn_reward"] == [1.0, 0.0, 9.0, None, 0.0, 4.0, None, 100.0, None, None]
    assert row["advantage"] == [1.0, -1.0, 0.0, None]
    # First turns: 1, 0 and none, with mean 0.5. Second turns: 0 and 4, with mean 2.
    assert row["turn_advantage"] == [1.25, 0.0, 1.0, None, -1.25, 0.0, 0.0, None, None, None]
    # With all later rewards. First turns: 10, 4 and none. Second turns: 9, 4. Third turn: 9.
    summed = scored(config(coef=0.5, gamma=1)).to_pylist()[0]
    assert summed["turn_advantage"][:7] == [2.5, 2.25, 1.0, None, -2.5, -2.25, 0.0]
    assert "turn_advantage" not in scored(config()).column_names


def test_objectives_of_whole_trajectories_have_advantages_of_turns_too() -> None:
    (row,) = scored(config(coef=0.5, loss="gspo")).to_pylist()
    assert row["turn_advantage"] == scored(config(coef=0.5)).to_pylist()[0]["turn_advantage"]


def test_the_learner_trains_each_turn_with_its_advantage() -> None:
    long, retried, short = examples_of(scored(config(coef=0.5)))
    assert np.asarray(long.advantage)[long.loss_mask].tolist() == [1.25, 1.25, 0.0, 1.0]
    assert np.asarray(retried.advantage)[retried.loss_mask].tolist() == [-1.25, 0.0]
    assert short.advantage == 0.0
    assert [one.advantage for one in examples_of(scored(config()))] == [1.0, -1.0, 0.0]


def test_rewards_of_turns_are_counted() -> None:
    (found,) = summaries(scored(config()))
    (again,) = [scored_from_text(scored_to_text(found))]
    assert again.sessions is not None and again.sessions.rewarded_turns == 6
    assert _sessions([again])["session/turn_reward"] == pytest.approx(114 / 6)
    without = replace(again, sessions=replace(again.sessions, rewarded_turns=0, turn_reward=0.0))
    assert "session/turn_reward" not in _sessions([without])


def test_a_reader_gets_the_turns_of_each_session() -> None:
    table = _explode(scored(config(coef=0.5)))
    assert table["turn_reward"].to_pylist() == [
        [1.0, 0.0, 9.0],
        [None, 0.0, 4.0],
        [None],
        [100.0, None, None],
    ]
    assert table["turn_advantage"].to_pylist()[1] == [None, -1.25, 0.0]
    rows = [row | {"staleness": 0, "outcome": "trained"} for row in table.to_pylist()]
    lines = samples_text(cast(Any, rows[1:3])).split("\n")
    assert lines[2] == "── rewards of turns: none, 0, 4"
    assert lines[3] == "── advantages of turns: none, -1.25, 0"
    assert sum("of turns" in line for line in lines) == 2  # the other session has no such reward


def books(tmp_path: Path, table: pa.Table, chosen: Config, last: int = 0) -> Books:
    pq.write_table(table, tmp_path / "groups.parquet")
    (row,) = read_rows(tmp_path / "groups.parquet")
    return unread_books(chosen, rows={(0, 3): row}, attempts=[{}] * (last + 1))


def with_advantages(table: pa.Table, values: list[float | None]) -> pa.Table:
    place = table.schema.get_field_index("turn_advantage")
    return table.set_column(
        place, table.schema.field(place), pa.array([values], pa.list_(pa.float32()))
    )


def test_the_audit_recomputes_advantages_of_turns(tmp_path: Path) -> None:
    chosen = config(coef=0.5, gamma=0.9, advantage="grpo")
    table = scored(chosen)
    check = check_turn_advantages(books(tmp_path, table, chosen))
    assert check.passed and check.summary == "1 groups"
    written = table["turn_advantage"][0].as_py()
    for place, value in ((0, written[0] + 0.01), (0, None), (7, 0.0), (1, math.nan)):
        changed = with_advantages(table, [*written[:place], value, *written[place + 1 :]])
        check = check_turn_advantages(books(tmp_path, changed, chosen))
        assert check.summary == "1 groups; wrong: 3" and not check.passed
    for other in ({"coef": 0.4, "gamma": 0.9}, {"coef": 0.5}, {}):
        assert not check_turn_advantages(books(tmp_path, table, config(**other))).passed
    # Groups of an earlier attempt may have had other settings.
    assert check_turn_advantages(books(tmp_path, table, config(), last=1)).passed
    plain = scored(config())
    assert check_turn_advantages(books(tmp_path, plain, config())).summary == "0 groups"
    assert not check_turn_advantages(books(tmp_path, plain, chosen)).passed
