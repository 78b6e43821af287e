"""The audit compares what the learner recorded of its tokens with the metrics of its steps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_audit import checks_of, run, whole_run, write_metrics  # noqa: F401

from asyncrl.contracts.rows import TRAINED_COLUMNS
from asyncrl.rundir.audited_tokens import read_trained
from asyncrl.rundir.record import read_record, write_record
from asyncrl.runtime.files.parquet import write_table

NAME = "the learner's tokens match the metrics"
Edit = Callable[[dict[str, Any]], None]


def write_trained(directory: Path, edit: Edit | None = None) -> None:
    """Write a row for each trajectory that a step of the last attempt trained, with means in the
    metrics. `edit` changes one row of the second step."""
    write_metrics(directory)
    rows = {
        (row["attempt"], row["ordinal"]): row
        for path in (directory / "groups").glob("*.parquet")
        for row in pq.read_table(path).to_pylist()
    }
    last = len(json.loads((directory / "run.json").read_text())["attempts"]) - 1
    found, edited = [], edit is None
    for path in sorted((directory / "outcomes").glob("*.parquet")):
        for ended in pq.read_table(path).to_pylist():
            if ended["outcome"] != "trained" or ended["ended_in"] != last:
                continue
            group = rows[ended["attempt"], ended["ordinal"]]
            for index, ids in enumerate(group["completion_ids"]):
                row = {
                    "attempt": ended["attempt"],
                    "ordinal": ended["ordinal"],
                    "index": index,
                    "trained_in": last,
                    "version": ended["trained_at_version"],
                    "positions": None,
                    "logprobs": [-0.5] * len(ids),
                    "weights": [1.5] * len(ids),
                    "advantages": [0.0] * len(ids),
                    "clipped": [True] * len(ids),
                    "masked": [False] * len(ids),
                }
                if (
                    edit is not None
                    and not edited
                    and found
                    and found[0]["version"] < row["version"]
                ):
                    edit(row)
                    edited = True
                found.append(row)
    assert edited
    folder = directory / "trained"
    folder.mkdir(exist_ok=True)
    half = len(found) // 2
    for rank, part in enumerate((found[:half], found[half:])):
        name = f"attempt_{last:04d}-rank_{rank:04d}-00000003.parquet"
        write_table(
            pa.Table.from_pylist(part, pa.schema([*TRAINED_COLUMNS.items()])), folder / name
        )
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    means = {"weight_mean": 1.5, "clip_fraction": 1.0, "mask_fraction": 0.0}
    text = "".join(json.dumps(one | means if "tokens" in one else one) + "\n" for one in lines)
    (directory / "metrics.jsonl").write_text(text)


def test_what_was_recorded_agrees(run: Path) -> None:  # noqa: F811
    set_last(run, records_tokens=None)
    assert checks_of(run)[NAME].summary.startswith("0 tokens"), "of the attempts before"
    write_trained(run)
    set_last(run, records_tokens=True, outcome="finished")
    checks = checks_of(run)
    assert all(check.passed for check in checks.values()), [
        check.summary for check in checks.values() if not check.passed
    ]
    assert checks[NAME].summary.endswith(" tokens") and checks[NAME].summary[0] != "0"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("logprobs", float("nan"), "a log-prob of nan is not possible"),
        ("logprobs", 5.0, "a log-prob of 5.0 is not possible"),
        ("index", 40, "has no trajectory 40"),
        ("positions", [10**6, 10**6 + 1], "no tokens at the recorded positions"),
        ("positions", [0, 0], "no tokens at the recorded positions"),
        ("weights", 9.0, "weight_mean 1.5, the recorded tokens give"),
        ("clipped", False, "clip_fraction 1.0, the recorded tokens give"),
        ("masked", True, "mask_fraction 0.0, the recorded tokens give"),
    ],
)
def test_a_changed_value_is_named(run: Path, name: str, value: object, text: str) -> None:  # noqa: F811
    def edit(row: dict[str, Any]) -> None:
        if isinstance(row[name], list):
            row[name][0] = value
        elif isinstance(value, list):
            row[name] = [value[min(at, 1)] + max(0, at - 1) for at in range(len(row["logprobs"]))]
        else:
            row[name] = value

    write_trained(run, edit)
    check = checks_of(run)[NAME]
    assert not check.passed and text in check.summary and "step" in check.summary


def test_a_token_that_is_missing_or_another_groups_is_named(run: Path) -> None:  # noqa: F811
    def shorter(row: dict[str, Any]) -> None:
        for values in row.values():
            if isinstance(values, list):
                values.pop()

    write_trained(run, shorter)
    set_last(run, outcome="finished")
    check = checks_of(run)[NAME]
    assert not check.passed and "tokens are missing" in check.summary
    write_trained(run, lambda row: row.update(ordinal=99_999))
    assert not checks_of(run)[NAME].passed


@pytest.mark.parametrize("outcome", [None, "failed", "interrupted"])
def test_an_attempt_that_did_not_finish_may_lack_steps_that_no_checkpoint_has(
    run: Path,  # noqa: F811
    outcome: str | None,
) -> None:
    """Its learner was ended while it wrote them: those of the last steps, or one rank's of one."""
    write_trained(run)
    (run / "trained").joinpath("attempt_0005-rank_0000-00000003.parquet").unlink()
    set_last(run, outcome=outcome)
    assert checks_of(run)[NAME].passed
    metrics = run / "metrics.jsonl"
    saved = {"event": "checkpoint", "attempt": 5, "step": 24, "version": 24, "time": 2.0}
    text = metrics.read_text()
    metrics.write_text(text + json.dumps({"schema": 1} | saved) + "\n")
    assert "tokens are missing" in checks_of(run)[NAME].summary, "its checkpoint is later"
    metrics.write_text(text)
    set_last(run, outcome="finished")
    assert "tokens are missing" in checks_of(run)[NAME].summary, "it was not ended"


def test_a_folder_that_was_removed_is_missed(run: Path) -> None:  # noqa: F811
    write_trained(run)
    shutil.rmtree(run / "trained")
    set_last(run, records_tokens=None, outcome="finished")
    assert checks_of(run)[NAME].passed, "an older run recorded none"
    set_last(run, records_tokens=True, outcome="finished")
    assert "tokens are missing" in checks_of(run)[NAME].summary


def test_a_group_that_no_step_took_is_named(run: Path) -> None:  # noqa: F811
    write_trained(run)
    set_last(run, outcome="finished")
    assert checks_of(run)[NAME].passed
    path = run / "trained" / "attempt_0005-rank_0000-00000003.parquet"
    rows = pq.read_table(path)
    stranger = rows.slice(0, 1).to_pylist()[0] | {"ordinal": 77_777, "version": 999}
    added = pa.Table.from_pylist([stranger], rows.schema)
    write_table(added, path.with_name("attempt_0005-rank_0000-00000004.parquet"))
    check = checks_of(run)[NAME]
    assert not check.passed and "group 77777 was not taken by a step of attempt 5" in check.summary


def test_two_rows_that_differ_are_named(run: Path) -> None:  # noqa: F811
    write_trained(run)
    path = run / "trained" / "attempt_0005-rank_0000-00000003.parquet"
    copy = path.with_name("attempt_0005-rank_0000-00000004.parquet")
    rows = pq.read_table(path)
    write_table(rows.slice(0, 1), copy)
    assert checks_of(run)["every file can be read"].passed, "a crash in a merge leaves copies"
    other = rows.slice(0, 1).to_pylist()[0]
    other["logprobs"][0] = -3.0
    write_table(pa.Table.from_pylist([other], rows.schema), copy)
    check = checks_of(run)["every file can be read"]
    assert not check.passed and "has two rows that differ" in check.summary


def set_last(run: Path, **changes: Any) -> None:  # noqa: F811
    """Change the record of the last attempt. None removes a field."""
    record = read_record(run)
    last: Any = record["attempts"][-1]
    for name, value in changes.items():
        last.pop(name, None)
        if value is not None:
            last[name] = value
    write_record(run, record)


@pytest.mark.parametrize("how", ["cut", "other columns", "lengths", "attempt"])
def test_a_damaged_file_is_named(run: Path, how: str) -> None:  # noqa: F811
    write_trained(run)
    path = sorted((run / "trained").iterdir())[0]
    table = pq.read_table(path)
    if how == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    elif how == "other columns":
        write_table(table.drop_columns(["weights"]), path)
    elif how == "lengths":
        rows = table.to_pylist()
        rows[0]["clipped"].pop()
        write_table(pa.Table.from_pylist(rows, table.schema), path)
    else:
        path.rename(path.with_name(path.name.replace("0005", "0004")))
    check = checks_of(run)["every file can be read"]
    assert not check.passed and str(run / "trained") in check.summary


def test_a_file_without_rows_is_no_damage(tmp_path: Path) -> None:
    empty = pa.schema([*TRAINED_COLUMNS.items()]).empty_table()
    write_table(empty, tmp_path / "empty.parquet")
    assert read_trained(tmp_path / "empty.parquet") == []
