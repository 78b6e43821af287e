"""`asyncrl.open_run` on a directory written by the package's own writers."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small_run import small_group, write_small_run

import asyncrl
from asyncrl.contracts.errors import ConfigError
from asyncrl.contracts.group_table import groups_to_table
from asyncrl.contracts.outcomes import Outcome
from asyncrl.rundir.outcomes import OutcomesWriter
from asyncrl.rundir.reader import RunNotFoundError


@pytest.fixture
def small_run(tmp_path: Path) -> Path:
    return write_small_run(tmp_path / "runs" / "small")


def test_one_row_per_trajectory_with_its_outcome(small_run: Path) -> None:
    table = asyncrl.open_run(small_run).trajectories()
    assert len(table) == 2 * 14
    rows = {(row["ordinal"], row["index"]): row for row in table.to_pylist()}
    first, second = rows[6, 0], rows[6, 1]  # trained in step 3, from version 1
    assert (
        first["completion"],
        first["tokens"],
        first["reward"],
        first["reward/scorer"],
        first["advantage"],
    ) == ("7", 2, 1.0, 1.0, 1.0)
    assert (second["oldest_version"], second["newest_version"], second["reward/scorer"]) == (
        1,
        2,
        0.25,
    )
    assert (first["outcome"], first["step"], first["trained_at_version"], first["staleness"]) == (
        "trained",
        3,
        2,
        1,
    )
    assert first["answer"] == "7"
    assert rows[100, 0]["outcome"] == "dropped"
    assert rows[101, 0]["outcome"] is None
    assert table.column_names.index("completion_ids") >= 0
    assert "completion_text" not in table.column_names


def test_staleness_agrees_with_the_token_versions(small_run: Path) -> None:
    for row in asyncrl.open_run(small_run).trajectories().to_pylist():
        if row["outcome"] == "trained":
            assert row["trained_at_version"] - row["oldest_version"] == row["staleness"] <= 2


def test_a_group_flushed_twice_and_merged_files_count_once(small_run: Path) -> None:
    run = asyncrl.open_run(small_run)
    before = run.trajectories()
    pq.write_table(
        groups_to_table([small_group(3, 0)]), small_run / "groups" / "attempt_0-000100.parquet"
    )
    outcomes = OutcomesWriter(small_run / "outcomes", attempt=0)
    outcomes.files = 50
    outcomes.write([Outcome(0, 3, "trained", "", 1, 0, 0)])
    outcomes.flush()
    assert run.trajectories().num_rows == before.num_rows
    outcomes.compact()
    assert len(run.outcomes()) == 13


def test_the_same_ordinal_in_two_attempts_is_two_groups(small_run: Path) -> None:
    pq.write_table(
        groups_to_table([small_group(3, 0, attempt=1)]),
        small_run / "groups" / "attempt_1-000000.parquet",
    )
    rows = [
        row for row in asyncrl.open_run(small_run).trajectories().to_pylist() if row["ordinal"] == 3
    ]
    assert [(row["attempt"], row["outcome"]) for row in rows] == [
        (0, "trained"),
        (0, "trained"),
        (1, None),
        (1, None),
    ]


def test_status_and_metrics(small_run: Path) -> None:
    run = asyncrl.open_run(small_run)
    status = run.status()
    assert (status.phase, status.step, status.max_steps, status.version, status.committed) == (
        "evaluation",
        6,
        6,
        6,
        6,
    )
    assert status.last["eval/greedy_accuracy"] == 0.9
    assert [record["step"] for record in run.records("commit")] == [1, 2, 3, 4, 5, 6]
    metrics = run.metrics
    assert {
        "schema",
        "event",
        "step",
        "version",
        "time",
        "reward/mean",
        "eval/greedy_accuracy",
    } <= set(metrics.column_names)
    assert metrics["reward/mean"].null_count == 14
    assert run.config.rollout.n_samples_per_prompt == 2


def test_a_reader_sees_a_live_run_grow(tmp_path: Path) -> None:
    directory = write_small_run(tmp_path / "live", steps=2)
    run = asyncrl.open_run(directory)
    assert (run.status().version, len(run.groups())) == (2, 6)
    finished = write_small_run(tmp_path / "more", steps=4)
    for name in ("groups", "outcomes"):
        shutil.copytree(finished / name, directory / name, dirs_exist_ok=True)
    shutil.copy(finished / "metrics.jsonl", directory / "metrics.jsonl")
    (directory / "groups" / ".attempt_0-000500.parquet").write_bytes(b"half a file")
    assert (run.status().version, len(run.groups())) == (4, 10)


def test_a_run_that_has_just_started_has_empty_tables(small_run: Path) -> None:
    for name in ("groups", "outcomes"):
        shutil.rmtree(small_run / name)
    (small_run / "metrics.jsonl").unlink()
    run = asyncrl.open_run(small_run)
    assert (
        len(run.trajectories()) == len(run.groups()) == len(run.outcomes()) == len(run.metrics) == 0
    )
    assert {"completion", "reward", "staleness", "outcome"} <= set(run.trajectories().column_names)
    status = run.status()
    assert (status.phase, status.step, status.version, status.committed) == ("starting", 0, 0, None)


def test_a_wrong_path_gives_a_one_line_error(small_run: Path) -> None:
    with pytest.raises(RunNotFoundError, match=r"is not a directory; give the path") as missing:
        asyncrl.open_run(small_run / "nothing")
    with pytest.raises(
        RunNotFoundError, match=rf"not a run directory; did you mean '{small_run}'\?"
    ) as parent:
        asyncrl.open_run(small_run.parent)
    assert "\n" not in str(missing.value) + str(parent.value)


def test_the_old_name_of_the_outcomes_folder_is_refused_with_the_new_name(small_run):
    (small_run / "outcomes").rename(small_run / "fates")
    with pytest.raises(ConfigError, match="fates has the old name of the outcomes folder; rename"):
        asyncrl.open_run(small_run)


def test_the_tokens_of_a_trajectory_have_what_both_sides_computed(small_run: Path) -> None:
    run = asyncrl.open_run(small_run)
    found = run.tokens(6, 1).to_pylist()
    assert [row["token"] for row in found] == [0, 1, 2] and [row["id"] for row in found] == [
        9,
        9,
        2,
    ]
    assert [row["version"] for row in found] == [1, 2, 2]
    for row in found:
        assert row["ratio"] == pytest.approx(
            math.exp(row["learner_logprob"] - row["generator_logprob"])
        )
        assert row["ratio"] == pytest.approx(math.exp(0.1), rel=1e-6)
        assert (row["weight"], row["advantage"], row["masked"]) == (1.25, -1.0, False)
    assert [row["clipped"] for row in found] == [False, False, True]
    dropped = run.tokens(100).to_pylist()
    assert [row["trained"] for row in dropped] == [False, False]
    assert dropped[0]["learner_logprob"] is None and dropped[0]["ratio"] is None
    assert dropped[0]["generator_logprob"] == pytest.approx(-0.1)
    for missing in ((6, 2, None), (6, -1, None), (9999, 0, None), (6, 0, 3)):
        with pytest.raises(ValueError, match="has no trajectory"):
            run.tokens(*missing)
    shutil.rmtree(small_run / "trained")  # a run that did not record them
    assert [row["trained"] for row in run.tokens(6, 1).to_pylist()] == [False] * 3
