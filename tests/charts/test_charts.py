"""Charts of small tables and of a small run: what they show, and what they say without data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from small_run import write_small_run

import asyncrl
from asyncrl.charts import Chart, asynchrony, learning, picture
from asyncrl.charts.drawing import DARK, LIGHT, MOST_POINTS
from asyncrl.charts.series import points
from asyncrl.rundir.charts import RunCharts

HOSTILE = "</script>.[0]'\"\\\u202e"
OF_METRICS: tuple[Callable[[pa.Table], Chart], ...] = (
    learning.reward,
    learning.reward_parts,
    learning.accuracy,
    learning.lengths,
    learning.policy,
    learning.losses,
    learning.preferences,
    asynchrony.waits,
    asynchrony.publication,
    asynchrony.throughput,
    asynchrony.memory,
)
OF_OUTCOMES = (asynchrony.staleness, asynchrony.versions)


def metrics(*records: dict[str, Any]) -> pa.Table:
    """The table that `Run.metrics` makes of these records."""
    names = list(dict.fromkeys(name for record in records for name in record))
    return pa.table({name: [record.get(name) for record in records] for name in names})


def outcomes(*trained: tuple[int, int]) -> pa.Table:
    """Outcomes of groups, each with the step that trained it and its staleness, and of one that no
    step trained."""
    rows = [
        {"outcome": "trained", "step": step, "trained_at_version": step - 1, "staleness": stale}
        for step, stale in trained
    ]
    dropped = {"outcome": "dropped", "step": 1, "trained_at_version": None, "staleness": None}
    return pa.Table.from_pylist([*rows, dropped])


def values(chart: Chart) -> Iterator[dict[str, Any]]:
    """The rows of all data of a chart."""
    for rows in chart.to_dict()["datasets"].values() if "datasets" in chart.to_dict() else ():
        yield from rows

    def inline(part: Any) -> Iterator[dict[str, Any]]:
        if isinstance(part, dict):
            if isinstance(part.get("data"), dict):
                yield from part["data"].get("values", [])
            for one in part.values():
                yield from inline(one)
        elif isinstance(part, list):
            for one in part:
                yield from inline(one)

    yield from inline(chart.to_dict())


def words(chart: Chart) -> str:
    """What a chart without data says."""
    return " ".join(str(row["why"]) for row in values(chart)).replace("\n", " ")


def test_a_curve_has_the_values_of_the_run() -> None:
    table = metrics(
        {"event": "step", "step": 1, "reward/mean": 0.25, "reward/std": 0.5, "reward/min": 0.0,
         "reward/max": 1.0},
        {"event": "step", "step": 2, "reward/mean": 0.75, "reward/std": 0.5, "reward/min": 0.0,
         "reward/max": 1.0},
        {"event": "commit", "step": 2, "reward/mean": 9.0},
    )  # fmt: skip
    rows = list(values(learning.reward(table)))
    assert [(row["x"], row["y"]) for row in rows if "y" in row] == [(1, 0.25), (2, 0.75)]
    spread = [(row["x"], row["low"], row["high"]) for row in rows if "low" in row]
    assert spread == [(1, 0.0, 0.75), (2, 0.25, 1.0)]


def test_runs_are_compared_by_name() -> None:
    runs = {
        name: metrics(
            {"event": "evaluation", "step": 4, "version": 3, "eval/greedy_accuracy": accuracy}
        )
        for name, accuracy in (("seed 0", 0.5), ("shuffled", 0.2))
    }
    chart = learning.compared("accuracy", runs, "eval/greedy_accuracy", "evaluation")
    found = {(row["series"], row["x"], row["y"]) for row in values(chart)}
    assert found == {("seed 0", 3, 0.5), ("shuffled", 3, 0.2)}, "by the version that was evaluated"
    none = learning.compared("accuracy", runs, "eval/x", "evaluation")
    assert "records eval/x." in words(none)


def test_a_repeated_step_counts_once_and_numbers_that_are_none_are_left_out() -> None:
    table = metrics(
        {"event": "step", "step": 2, "loss": 3.0},
        {"event": "step", "step": 1, "loss": 1.0},
        {"event": "step", "step": 2, "loss": 2.0},
        {"event": "step", "step": 3, "loss": math.nan},
        {"event": "step", "step": 4, "loss": None},
        {"event": "step", "step": 5, "loss": math.inf},
    )
    assert points(table, "step", "loss") == [(1, 1.0), (2, 2.0)]
    assert points(table, "step", "absent") == []


def test_a_long_run_has_as_many_points_as_a_picture_has_columns() -> None:
    many = [{"event": "step", "step": step, "loss": float(step)} for step in range(20_000)]
    found = [row["y"] for row in values(learning.losses(metrics(*many)))]
    assert MOST_POINTS // 2 < len(found) <= MOST_POINTS
    assert sum(found) / len(found) == pytest.approx(9999.5, rel=0.01)


def test_staleness_counts_the_groups_of_each_step() -> None:
    table = outcomes((1, 0), (1, 0), (2, 1), (2, 0), (3, 2))
    counted = {
        (row["x"] + 0.5, row["y"] + 0.5): row["value"]
        for row in values(asynchrony.staleness(table))
    }
    assert counted == {(1, 0): 2, (2, 1): 1, (2, 0): 1, (3, 2): 1}
    made = {
        (row["x"] + 0.5, row["y"] + 0.5): row["value"]
        for row in values(asynchrony.versions(table, last=2))
    }
    assert made == {(1, 0): 1, (1, 1): 1, (2, 0): 1}


def test_steps_that_share_a_column_keep_their_groups() -> None:
    table = outcomes(*((step, step % 3) for step in range(1, 1001) for _ in range(2)))
    rows = list(values(asynchrony.staleness(table)))
    assert sum(row["value"] * (row["x2"] - row["x"]) for row in rows) == pytest.approx(2000)
    assert len({row["x"] for row in rows}) <= 120


@pytest.mark.parametrize("chart", OF_METRICS, ids=lambda one: one.__name__)
def test_a_chart_without_data_says_so(chart: Callable[[pa.Table], Chart]) -> None:
    for table in (pa.table({}), metrics({"event": "commit", "step": 0, "version": 0})):
        assert words(chart(table)).endswith(".")
        assert picture(chart(table)).startswith(b"<svg")


def test_a_chart_names_the_setting_that_would_record_it() -> None:
    assert "eval.data" in words(learning.accuracy(pa.table({})))
    sft = metrics({"event": "step", "step": 1, "loss": 0.5})
    assert "dataset" in words(learning.reward(sft))
    assert "pairs" in words(learning.preferences(sft))


@pytest.mark.parametrize("chart", OF_OUTCOMES, ids=lambda one: one.__name__)
def test_a_run_without_trained_groups_has_no_staleness(
    chart: Callable[[pa.Table], Chart],
) -> None:
    assert "No trained group" in words(chart(outcomes()))


def test_names_of_users_stay_text() -> None:
    """A reward's name may hold anything."""
    name = f"reward/{HOSTILE}"
    table = metrics(*({"event": "step", "step": step, name: 0.5} for step in (1, 2)))
    chart = learning.reward_parts(table)
    assert {row["series"] for row in values(chart)} == {HOSTILE}
    assert b"</script>" not in picture(chart)


def test_more_series_than_colors_are_small_charts_beside_one_another() -> None:
    names = [f"reward/f/{number}" for number in range(7)]
    table = metrics({"event": "step", "step": 1, **dict.fromkeys(names, 0.5)})
    found = learning.reward_parts(table).to_dict()
    assert [one["title"]["text"] for one in found["concat"]] == [f"f/{n}" for n in range(7)]


def test_bars_lie_on_one_another() -> None:
    table = metrics(
        {"event": "step", "step": 1, "time/step_s": 2.0, "time/learner_waited_s": 3.0},
        {"event": "step", "step": 2, "time/step_s": 1.0, "time/learner_waited_s": 0.0},
    )
    rows = [row for row in values(asynchrony.waits(table)) if "high" in row]
    assert [(row["at"], row["low"], row["high"]) for row in rows] == [
        (1, 0, 2), (1, 2, 5), (2, 0, 1), (2, 1, 1)
    ]  # fmt: skip


def test_a_dark_picture_has_other_colors() -> None:
    table = metrics(*({"event": "step", "step": step, "loss": 0.5} for step in (1, 2)))
    light, dark = (picture(learning.losses(table), dark=dark).decode() for dark in (False, True))
    assert LIGHT[0] in light and LIGHT[0] not in dark and DARK[0] in dark
    assert picture(learning.losses(table), "png").startswith(b"\x89PNG")


def test_every_chart_of_a_run_can_be_drawn(tmp_path: Path) -> None:
    run = asyncrl.open_run(write_small_run(tmp_path / "run"))
    drawn = [name for name in vars(RunCharts) if not name.startswith("_") and name != "dark"]
    assert len(drawn) == len(OF_METRICS) + len(OF_OUTCOMES) + 1  # the timeline
    for charts in (run.charts, run.charts.dark):
        for name in drawn:
            chart = getattr(charts, name)()
            assert picture(chart).startswith(b"<svg"), name
            assert chart.to_dict()["config"]["background"] in ("#ffffff", "#1e1e1e")


def test_a_notebook_gets_a_picture(tmp_path: Path) -> None:
    run = asyncrl.open_run(write_small_run(tmp_path / "run"))
    shown = run.charts.reward()._repr_mimebundle_()
    assert "image/svg+xml" in str(shown)


def test_memory_is_in_gigabytes_by_part() -> None:
    steps = [
        {
            "event": "step",
            "step": step,
            "memory/learner_bytes": 2.5e9 * step,
            "memory/node_ratio": 0.5,
        }
        for step in (1, 2)
    ]
    found = [*values(asynchrony.memory(metrics(*steps)))]
    assert {row["y"] for row in found if row["series"] == "learner rank"} == {2.5, 5.0}
    assert {row["y"] for row in found if row["series"] != "learner rank"} == {0.5}
    assert "older" in str(asynchrony.memory(metrics({"event": "step", "step": 1})).to_dict())
