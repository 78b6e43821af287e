"""The audit compares what the learner recorded of its tokens with the metrics of its steps."""

from __future__ import annotations

import json
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
    assert checks_of(run)[NAME].summary == "none recorded"
    write_trained(run)
    checks = checks_of(run)
    assert all(check.passed for check in checks.values()), [
        check.summary for check in checks.values() if not check.passed
    ]
    assert checks[NAME].summary.endswith(" tokens") and checks[NAME].summary[0] != "0"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("logprobs", float("nan"), "a recorded log-prob is not finite"),
        ("weights", 9.0, "weight_mean 1.5, the recorded tokens give"),
        ("clipped", False, "clip_fraction 1.0, the recorded tokens give"),
        ("masked", True, "mask_fraction 0.0, the recorded tokens give"),
    ],
)
def test_a_changed_value_is_named(run: Path, name: str, value: object, text: str) -> None:  # noqa: F811
    def edit(row: dict[str, Any]) -> None:
        row[name][0] = value

    write_trained(run, edit)
    check = checks_of(run)[NAME]
    assert not check.passed and text in check.summary and "step" in check.summary


def test_a_token_that_is_missing_or_another_groups_is_named(run: Path) -> None:  # noqa: F811
    def shorter(row: dict[str, Any]) -> None:
        for values in row.values():
            if isinstance(values, list):
                values.pop()

    write_trained(run, shorter)
    check = checks_of(run)[NAME]
    assert not check.passed and "tokens are missing" in check.summary
    write_trained(run, lambda row: row.update(ordinal=99_999))
    assert not checks_of(run)[NAME].passed


def test_a_killed_attempt_may_lack_its_last_steps(run: Path) -> None:  # noqa: F811
    write_trained(run)
    (run / "trained").joinpath("attempt_0005-rank_0001-00000003.parquet").unlink()
    assert checks_of(run)[NAME].passed
    metrics = run / "metrics.jsonl"
    saved = {"event": "checkpoint", "attempt": 5, "step": 24, "version": 24, "time": 2.0}
    text = metrics.read_text()
    metrics.write_text(text + json.dumps({"schema": 1} | saved) + "\n")
    assert "tokens are missing" in checks_of(run)[NAME].summary, "its checkpoint is later"
    metrics.write_text(text)
    record = read_record(run)
    record["attempts"][-1]["outcome"] = "finished"
    write_record(run, record)
    assert "tokens are missing" in checks_of(run)[NAME].summary, "it was not killed"


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
    assert read_trained(tmp_path / "empty.parquet") == {}
