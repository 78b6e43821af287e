"""The timeline: every bar begins and ends when the run's files say so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from small_run import small_group, write_small_run

import asyncrl
from asyncrl.charts import picture
from asyncrl.charts.moments import (
    BUFFER,
    GENERATES,
    PAUSES,
    SCORING,
    SIBLINGS,
    STEPS,
    TOOLS,
    WAITS,
    Bar,
    Moments,
    _by_version,
)
from asyncrl.charts.timeline import MOST_WINDOWS, WINDOW, timeline, windows
from asyncrl.contracts.group_table import groups_to_table
from asyncrl.rundir.reader import _records_table


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> asyncrl.Run:
    return asyncrl.open_run(write_small_run(tmp_path_factory.mktemp("runs") / "small"))


@pytest.fixture(scope="module")
def moments(run: asyncrl.Run) -> Moments:
    return Moments(run.groups(), run.outcomes(), run.metrics)


def of_row(bars: list[Bar], row: int) -> list[tuple[str, float, float, int | None]]:
    return [
        (bar.kind, round(bar.start, 6), round(bar.end, 6), bar.version)
        for bar in bars
        if bar.row == row
    ]


def test_a_trajectory_changes_its_color_when_its_replica_had_the_next_version(
    moments: Moments,
) -> None:
    """Step 6 trains group 12, whose second trajectory begins with version 4, and step 6 begins at
    26. Version 5 was there at 22.6."""
    window = moments.window(6, 6, 100)
    row = window.names.index("group 12, trajectory 1")
    assert of_row(window.bars, row) == [
        (WAITS, 21.5, 22.2, None),
        (GENERATES, 22.2, 22.6, 4),
        (GENERATES, 22.6, 23.0, 5),
        (SIBLINGS, 23.0, 23.0, None),
        (SCORING, 23.0, 24.0, None),
        (BUFFER, 24.0, 26.0, None),
    ]
    assert of_row(window.bars, row - 1)[:3] == [
        (WAITS, 21.5, 22.1, None),
        (GENERATES, 22.1, 22.4, 4),
        (SIBLINGS, 22.4, 23.0, None),
    ]


def test_a_moment_that_contradicts_the_spans_is_in_proportion_and_said(moments: Moments) -> None:
    """Version 5 came before group 13 began, which its spans contradict."""
    window = moments.window(6, 6, 100)
    row = window.names.index("group 13, trajectory 1")
    first, second = [bar for bar in window.bars if bar.row == row and bar.kind == GENERATES]
    assert first.end == second.start == pytest.approx(23.2 + 0.8 / 3)
    assert "contradict" in first.note and "guess" not in second.note


def test_lanes_have_the_steps_and_pauses_of_the_window(moments: Moments) -> None:
    window = moments.window(5, 6, 100)
    steps = [(bar.start, bar.end) for bar in window.lanes if bar.row == STEPS]
    assert (24.0, 24.5) in steps and (26.0, 26.5) in steps
    assert (22.5, 22.7) in [(bar.start, bar.end) for bar in window.lanes if bar.row == PAUSES]


def test_a_lost_group_is_marked_with_its_reason(tmp_path: Path) -> None:
    lost = groups_to_table([replace(small_group(12, 4), scored_at=23.5)])
    outcomes = pa.Table.from_pylist(
        [{"attempt": 0, "ordinal": 12, "outcome": "dropped", "reason": "stale", "step": 7}],
        pa.schema(
            [
                ("attempt", pa.int32()),
                ("ordinal", pa.int64()),
                ("outcome", pa.string()),
                ("reason", pa.string()),
                ("step", pa.int32()),
            ]
        ),
    )
    step = {"event": "step", "attempt": 0, "step": 7, "version": 7, "time/started_at": 99.0}
    window = Moments(lost, outcomes, pa.Table.from_pylist([step])).window(7, 7, 10)
    assert [(bar.kind, bar.note) for bar in window.bars if bar.start == bar.end == 23.5] == [
        ("dropped", "dropped by step 7: stale")
    ] * 2


def test_a_step_that_an_attempt_repeated_has_the_newest_ones_groups() -> None:
    """Attempt 0 trained step 5 at 103, and attempt 1 trained it again at 1003."""
    made = [replace(small_group(10, 3, attempt), finished_at=21.0) for attempt in (0, 1)]
    ended = [
        {
            "attempt": at,
            "ordinal": 10,
            "outcome": "trained",
            "reason": "",
            "step": 5,
            "ended_in": at,
        }
        for at in (0, 1)
    ]
    steps = [
        {"event": "step", "attempt": at, "step": 5, "version": 5, "time/started_at": began}
        for at, began in ((0, 103.0), (1, 1003.0))
    ]
    tables = (groups_to_table(made), pa.Table.from_pylist(ended), pa.Table.from_pylist(steps))
    window = Moments(*tables).window(5, 5, 10)
    assert window.names == [f"group 10 of attempt 1, trajectory {index}" for index in (0, 1)]
    assert {bar.end for bar in window.bars if bar.kind == BUFFER} == {1003.0}


def test_a_group_without_an_end_is_not_lost() -> None:
    ended = {"attempt": 0, "ordinal": 12, "outcome": "waiting", "reason": "", "step": 7}
    step = {"event": "step", "attempt": 0, "step": 7, "version": 7, "time/started_at": 99.0}
    tables = (groups_to_table([small_group(12, 4)]), pa.Table.from_pylist([ended]))
    assert Moments(*tables, pa.Table.from_pylist([step])).window(7, 7, 10).groups == 0


def test_a_recorded_moment_bounds_a_guess() -> None:
    spans = [{"version": at, "start": 4 * at, "end": 4 * at + 4} for at in (1, 2, 3)]
    first, second, third = _by_version(0, 1.0, 13.0, spans, {3: 4.0})
    assert (first.end, second.end, third.end) == (4.0, 4.0, 13.0)
    assert "was not recorded" in first.note and "guess" not in second.note


def test_turns_of_a_session_have_the_environment_between_them() -> None:
    session: dict[str, Any] = {
        "attempt": 0,
        "ordinal": 3,
        "replica": "a",
        "admitted_at": 1.0,
        "started_at": 2.0,
        "finished_at": 9.0,
        "scored_at": 9.5,
        "versions": [[{"version": 1, "start": 0, "end": 6}, {"version": 2, "start": 6, "end": 8}]],
        "turn_trajectory": [0, 0],
        "turn_tokens": [4, 4],
        "turn_replica": ["a", "a"],
        "turn_started_at": [2.0, 6.0],
        "turn_finished_at": [3.0, 8.0],
    }
    rows = {"attempt": 0, "ordinal": 3, "outcome": "trained", "reason": "", "step": 1}
    push = {"event": "push", "attempt": 0, "replica": "a", "version": 2, "weights/applied_at": 7.5}
    step = {"event": "step", "attempt": 0, "step": 1, "version": 1, "time/started_at": 10.0}
    records = pa.Table.from_pylist([push | dict.fromkeys(step.keys() - push.keys()), step])
    window = Moments(pa.Table.from_pylist([session]), pa.Table.from_pylist([rows]), records).window(
        1, 1, 10
    )
    assert of_row(window.bars, 0) == [
        (WAITS, 1.0, 2.0, None),
        (GENERATES, 2.0, 3.0, 1),
        (TOOLS, 3.0, 6.0, None),
        (GENERATES, 6.0, 7.5, 1),
        (GENERATES, 7.5, 8.0, 2),
        (SIBLINGS, 8.0, 9.0, None),
        (SCORING, 9.0, 9.5, None),
        (BUFFER, 9.5, 10.0, None),
    ]


def test_a_request_that_came_during_a_pause_waits_for_its_version() -> None:
    spans = [{"version": 2, "start": 4, "end": 6}, {"version": 3, "start": 6, "end": 8}]
    bars = _by_version(0, 1.0, 9.0, spans, {2: 3.0, 3: 5.0})
    assert of_row(bars, 0) == [
        (WAITS, 1.0, 3.0, None),
        (GENERATES, 3.0, 5.0, 2),
        (GENERATES, 5.0, 9.0, 3),
    ]


def test_more_groups_than_rows_are_chosen_evenly_and_counted(moments: Moments) -> None:
    window = moments.window(1, 6, 6)
    assert (window.shown, window.groups, len(window.names)) == (3, 13, 6)


def test_windows_cover_a_short_run_and_spread_over_a_long_one(run: asyncrl.Run) -> None:
    assert windows(Moments(run.groups(), run.outcomes(), run.metrics)) == [WINDOW, 6]
    steps = [
        {
            "event": "step",
            "attempt": 0,
            "step": step,
            "version": step,
            "time/started_at": 1.0 + step,
        }
        for step in range(1, 1001)
    ]
    long = Moments(run.groups(), run.outcomes(), pa.Table.from_pylist(steps))
    found = windows(long, [501])
    assert len(found) == MOST_WINDOWS + 1 and 501 in found and found[-1] == 1000


def test_it_draws_and_says_what_is_missing(run: asyncrl.Run) -> None:
    tables = (run.groups(), run.outcomes(), run.metrics)
    assert picture(timeline(*tables)).startswith(b"<svg")
    assert b"no times of its steps" in picture(timeline(*tables[:2], pa.table({})))
    assert b"Nothing is recorded of step 99" in picture(timeline(*tables, step=99, steps=1))
    assert picture(run.charts.timeline(step=4)).startswith(b"<svg")


def test_the_last_window_has_what_waits_and_what_came_after_the_last_step(
    run: asyncrl.Run,
) -> None:
    """Step 6 lasts from 26 to 26.5, so the window may last until 27. Group 14 is scored at 26."""
    groups = pa.concat_tables(
        [run.groups(), groups_to_table([small_group(14, 4)])], promote_options="permissive"
    )
    records = [dict(record) for record in run.records()]
    for record in records:
        if record["event"] in ("commit", "evaluation"):
            record["time"] = 26.8 if record["event"] == "evaluation" else 26.6
            record["eval/seconds"] = 0.2
    metrics = _records_table(records)
    moments = Moments(groups, run.outcomes(), metrics)
    window = moments.window(6, 6, 100)
    row = window.names.index("group 14, trajectory 0")
    assert of_row(window.bars, row)[-1] == (BUFFER, 26.0, 26.8, None)
    assert [bar.note for bar in window.bars if bar.row == row][-1] == "no step has taken it yet"
    evaluations = {(bar.start, bar.end) for bar in window.lanes if bar.row == "evaluations"}
    assert {(round(start, 6), round(end, 6)) for start, end in evaluations} == {(26.6, 26.8)}
    assert "group 14, trajectory 0" not in moments.window(5, 5, 100).names
    for record in records:
        record["attempt"] = 1  # that resumed
    resumed = _records_table(records)
    for taken, shown in (((), False), ([(0, 14)], True)):
        names = Moments(groups, run.outcomes(), resumed, taken).window(6, 6, 100).names
        assert any(name.startswith("group 14") for name in names) == shown
    chart = timeline(groups, run.outcomes(), metrics, step=6, steps=1)
    assert picture(chart).startswith(b"<svg")
